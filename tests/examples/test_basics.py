"""Examples of control flow, references, host data and float8, compared with NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from examples import by_reference, control_flow, float8, host_io


def test_collatz_lengths() -> None:
    def length(n: int) -> int:
        return 0 if n == 1 else 1 + length(n // 2 if n % 2 == 0 else 3 * n + 1)

    starts = np.arange(1, 20)
    found = control_flow.collatz_lengths(starts.astype(np.float32), limit=15)
    assert found.tolist() == [min(length(int(n)), 15) for n in starts]


def test_variables_change_by_reference() -> None:
    xs = np.random.default_rng(0).normal(size=(5, 8, 3)).astype(np.float32)
    found = by_reference.moving_statistics(xs, momentum=0.75)
    mean = np.zeros(3)
    for x in xs:
        mean = 0.75 * mean + 0.25 * x.mean(0)
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["largest"], xs.max((0, 1)))
    assert found["count"] == 5


@pytest.mark.parametrize(("transfers", "replicas"), [(4, 2), (2, 1), (6, 3)])
def test_host_arrays_are_transfers_by_replicas(transfers: int, replicas: int) -> None:
    x = np.random.default_rng(0).normal(size=(transfers, replicas, 2)).astype(np.float32)
    a, b = x[0::2], x[1::2]
    expected = np.stack([a + b, a - b], axis=1).reshape(x.shape)
    np.testing.assert_array_equal(host_io.run(x), expected)


@pytest.mark.parametrize("in_host", [False, True])
def test_float8_product(in_host: bool) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 16), (16, 3)))
    y, stored = float8.linear_fp8(x, w, x_scale=3, in_host=in_host)
    assert stored.dtype.itemsize == 1
    # e4m3fnuz is the same format: bias 8, no infinities, 0x80 is NaN.
    w8 = stored.view(ml_dtypes.float8_e4m3fnuz).astype(np.float64)
    scale = 2.0 ** np.round(np.log2(np.abs(w8).max() / np.abs(w).max()))
    np.testing.assert_allclose(w8 / scale, w, rtol=2**-4, atol=2**-9)
    x8 = (x * 8).astype(ml_dtypes.float8_e4m3fnuz).astype(np.float64)
    np.testing.assert_allclose(y, x8 / 8 @ (w8 / scale), rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(y, x @ w, atol=0.6)
