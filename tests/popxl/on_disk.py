"""A program whose remote buffers have entries in files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

import popxl
from popxl import ops

ROWS, SIZE = 6, 3000  # no whole number of pages


def program(
    on_disk: int, replicas: int = 1, dtype: popxl.dtype = popxl.float32, size: int = SIZE
) -> tuple[popxl.Ir, list[popxl.Variable]]:
    """A loop over rows that updates a buffer of variables and one of zeros, then reads both."""
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        x, m = (popxl.remote_buffer((size,), dtype, ROWS) for _ in range(2))
        x.on_disk = m.on_disk = on_disk
        values = np.arange(ROWS * size).reshape(ROWS, size) % 100
        rows = [
            popxl.remote_variable(v.astype(dtype.as_numpy()), x, i) for i, v in enumerate(values)
        ]

        def update(row: popxl.Tensor) -> popxl.Tensor:
            a, b = ops.remote_load(x, row), ops.remote_load(m, row)
            b = a - b
            ops.remote_store(m, row, b)
            ops.remote_store(x, row, a + b)
            ops.remote_store(x, row, ops.remote_load(x, row) + b)
            return row + 1

        first = popxl.constant(0, popxl.int32)
        ops.repeat(ir.create_graph(update, first), ROWS, first)
    return ir, rows


def files_in(folder: Path) -> list[Path]:
    """Files without names that this process has there."""
    links = {link: os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()}
    return sorted(link for link, path in links.items() if path.startswith(str(folder) + "/popxl")
                  and path.endswith(" (deleted)"))  # fmt: skip
