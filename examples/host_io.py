"""How host arrays are laid out: transfers, then replicas, then the tensor."""

from __future__ import annotations

import numpy as np

import popxl
from popxl import ops


def pair_program(transfers: int, replicas: int):
    """Each iteration loads two successive values, and stores their sum, then their difference."""
    ir = popxl.Ir()
    with ir.main_graph:
        x_stream = popxl.h2d_stream((2,), popxl.float32, name="x")
        y_stream = popxl.d2h_stream((2,), popxl.float32, name="y")

        @popxl.in_sequence()
        def iteration() -> None:
            # A stream is a queue, shared by all its loads (or stores).
            a = ops.host_load(x_stream)
            b = ops.host_load(x_stream)
            ops.host_store(y_stream, a + b)
            ops.host_store(y_stream, a - b)

        ops.repeat(ir.create_graph(iteration), transfers // 2)
    # Both may be set after the graphs are built.
    ir.num_host_transfers = transfers
    ir.replication_factor = replicas
    return ir, x_stream, y_stream


def run(x: np.ndarray) -> np.ndarray:
    """Sums and differences of successive transfers: of the shape of `x`.

    Args:
        x: (transfers, replicas, 2).
    """
    transfers, replicas, _ = x.shape
    ir, _, y_stream = pair_program(transfers, replicas)
    with popxl.Session(ir, "ipu_model") as session:
        outputs = session.create_host_outputs()  # arrays of the right shapes, to be filled
        inputs = dict(zip(session.expected_inputs(), [x], strict=True))
        session.run_with_outputs(inputs, outputs)
    # Dimensions in front that are 1 are left out of results, and may be left out of inputs.
    return outputs[y_stream].reshape(x.shape)
