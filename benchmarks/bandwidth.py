"""How fast entries of remote buffers move, to the device, to the host, and both ways at once."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

import popxl
from popxl import ops
from popxl.session import DeviceDesc

_COLUMNS = 1024
_ENTRIES = 8  # that go each way in a run
_RUNS = 4
_SERIES = 3


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per second; the best of several series of runs.

    Attributes:
        loads, stores: from host memory to the device, and back, one way at a time.
        both: each way, when entries go both ways at once.
        memory: of device memory, read and written.
    """

    loads: float
    stores: float
    both: float
    memory: float

    @property
    def overlap(self) -> float:
        """The fraction of the shorter way's time that is hidden behind the other when both go."""
        loads, stores, both = 1 / self.loads, 1 / self.stores, 1 / self.both
        return (loads + stores - both) / min(loads, stores)


def bandwidths(device: DeviceDesc, mebibytes: int = 256) -> Bandwidths:
    """Measure.

    Args:
        mebibytes: of an entry.
    """
    shape = (mebibytes * 2**20 // (4 * _COLUMNS), _COLUMNS)
    nbytes = 4 * shape[0] * shape[1]

    def rate(loads: bool, stores: bool) -> float:
        with popxl.Session(_moving(shape, loads, stores), device) as session:
            return _ENTRIES * nbytes / _best(session)

    rows, columns = shape
    with popxl.Session(_in_memory((_ENTRIES * rows, columns)), device) as session:
        memory = 2 * _ENTRIES * nbytes / _best(session)
    return Bandwidths(rate(True, False), rate(False, True), rate(True, True), memory)


def _moving(shape: tuple[int, int], loads: bool, stores: bool) -> popxl.Ir:
    """Load an entry, add to it, and store it as one of another buffer; or one of the two."""
    ir = popxl.Ir()
    with ir.main_graph:
        source, target = (popxl.remote_buffer(shape, popxl.float32, _ENTRIES) for _ in range(2))
        zeros = np.zeros(shape, np.float32)
        for i in range(_ENTRIES):
            popxl.remote_variable(zeros, source, i)
        x = popxl.variable(zeros)

        def move(i: popxl.Tensor, total: popxl.Tensor, x: popxl.Tensor) -> list[popxl.Tensor]:
            value = ops.remote_load(source, i) if loads else x
            total = total + value[:1, :1]
            if stores:
                ops.remote_store(target, i, value + total)
            return [i + 1, total]

        first, total = popxl.constant(0, popxl.int32), x[:1, :1] + 1
        _, total = ops.repeat(ir.create_graph(move, first, total, x), _ENTRIES, first, total, x)
        ops.host_store(popxl.d2h_stream(total.shape, total.dtype), total)
    return ir


def _in_memory(shape: tuple[int, int]) -> popxl.Ir:
    """Read and write an array of the device's."""
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.zeros(shape, np.float32))
        ops.var_updates.accumulate_(x, popxl.constant(1.0, popxl.float32))
    return ir


def _best(session: popxl.Session) -> float:
    """Seconds of a run, after one that is not measured: of the fastest of several series, whose
    runs are dispatched one after the other and waited for together."""
    seconds = []
    for _ in range(_SERIES + 1):
        start = time.perf_counter()
        for _ in range(_RUNS):
            session.run()
        session.settle()
        seconds.append((time.perf_counter() - start) / _RUNS)
    return min(seconds[1:])
