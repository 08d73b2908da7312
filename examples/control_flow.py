"""Loops in loops, with branches that depend on data: how long Collatz sequences are."""

from __future__ import annotations

import numpy as np

import popxl
from popxl import ops


def collatz_lengths(starts: np.ndarray, limit: int) -> np.ndarray:
    """Steps until n -> n / 2 (even), 3 n + 1 (odd) reaches 1; at most `limit`.

    Args:
        starts: positive float32 integers, one for each host transfer.
    """
    ir = popxl.Ir()
    ir.num_host_transfers = len(starts)
    number = popxl.TensorSpec((), popxl.float32)
    with ir.main_graph:
        start_stream = popxl.h2d_stream((), popxl.float32, name="start")
        length_stream = popxl.d2h_stream((), popxl.float32, name="length")

        halve = ir.create_graph(lambda n: n * 0.5, number)
        triple = ir.create_graph(lambda n: n * 3 + 1, number)

        def advance(n: popxl.Tensor, length: popxl.Tensor):
            is_odd = ops.greater(n % 2, popxl.constant(0.5))
            (n,) = ops.conditional(is_odd, triple, halve, then_inputs=[n], else_inputs=[n])
            return n, length + 1

        def stay(n: popxl.Tensor, length: popxl.Tensor):
            return ops.identity(n), ops.identity(length)

        advance_graph = ir.create_graph(advance, number, number)
        stay_graph = ir.create_graph(stay, number, number)

        def step(n: popxl.Tensor, length: popxl.Tensor):
            running = ops.greater(n, popxl.constant(1.5))
            return ops.conditional(running, advance_graph, stay_graph, [n, length], [n, length])

        step_graph = ir.create_graph(step, number, number)

        def one_start() -> None:
            n = ops.host_load(start_stream)
            _, length = ops.repeat(step_graph, limit, n, popxl.constant(0.0))
            ops.host_store(length_stream, length)

        with popxl.in_sequence():
            ops.repeat(ir.create_graph(one_start), len(starts))
    with popxl.Session(ir, "ipu_model") as session:
        return session.run({start_stream: starts})[length_stream]


if __name__ == "__main__":
    print(collatz_lengths(np.arange(1, 11, dtype=np.float32), 30))
