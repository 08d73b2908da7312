"""Benchmark of the peak matrix multiplication rate (FLOP/s) of a device."""

from __future__ import annotations

import time

import numpy as np

import popxl
from popxl import ops
from popxl.ops.fp8_e4m3_e5m2 import OPERANDS
from popxl.session import DeviceDesc


def measure_matmul_rate(
    device: DeviceDesc = "cpu",
    dtype: popxl.dtype = popxl.float32,
    replicas: int = 1,
    size: int = 2048,
    products: int = 4,
    runs: int = 4,
    fp8: bool = False,
) -> float:
    """Measure the FLOP/s of square matrix multiplications: the best of several runs.

    A multiply-add counts as two operations. The matrices are random, since GPUs multiply constant
    ones faster; values stay of the same magnitude.

    Args:
        device: as for `popxl.Session`.
        replicas: devices that multiply at the same time; the rate is their sum.
        size: rows and columns of a matrix.
        products: products per run, each of the result of the one before.
        fp8: round the operands to FP8 first, as training in FP8 does.
    """

    def product(x: popxl.Tensor, a: popxl.Tensor) -> popxl.Tensor:
        if not fp8:
            return x @ a
        scale = popxl.constant(np.ones(len(OPERANDS)), popxl.float32)
        return ops.fp8.linear(x, a, scale, powers_of_2=True)

    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        x, a = (popxl.variable(_random_matrix(size, seed), dtype) for seed in range(2))
        (y,) = ops.repeat(ir.create_graph(product, x, a), products, x, a)
        ops.host_store(popxl.d2h_stream((1, 1), dtype), y[:1, :1])
    seconds = []
    with popxl.Session(ir, device) as session:
        for _ in range(runs + 1):
            start = time.perf_counter()
            session.run()
            seconds.append(time.perf_counter() - start)
    return replicas * products * 2 * size**3 / min(seconds)


def _random_matrix(size: int, seed: int) -> np.ndarray:
    """Return a random square matrix, float32 (size, size)."""
    return np.random.default_rng(seed).normal(0, size**-0.5, (size, size)).astype(np.float32)
