"""Shapes that transposed convolutions are asked for, against torch; what float8 ones refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import popxl
from popxl import ops
from tests.popxl.programs import f32, run

X, W = f32(1, 2, 4, 3), f32(2, 3, 3, 2, seed=1)


@pytest.mark.parametrize("shape", [(1, 3, 9, 6), (9, 6), (1, 3, 12, 9)])
def test_output_shape_decides_and_what_is_beyond_is_zeros(shape: tuple[int, ...]) -> None:
    """The full result is (9, 6)."""

    def build(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
        return ops.conv_transpose(x, w, (2, 2), padding=(1, 1, 1, 1), output_shape=shape)

    (found,) = run(build, X, W)
    full = F.conv_transpose2d(torch.tensor(X, dtype=torch.float64), torch.tensor(W).double(),
                              stride=2).numpy()  # fmt: skip
    assert found.shape == (1, 3, *shape[-2:])
    more = [n - m for n, m in zip(shape[-2:], full.shape[2:], strict=True)]
    sides = [(n // 2, n - n // 2) for n in more]
    places = [np.pad(full, [(0, 0), (0, 0), *s]) for s in (sides, [b[::-1] for b in sides])]
    # An odd number of zeros may have its larger half on either side.
    assert any(np.allclose(found, p, rtol=1e-5, atol=1e-5) for p in places)


@pytest.mark.parametrize(("stride", "dilation", "extra", "padding"),
                         [(2, 1, 1, (0, 1, 1, 0)), (1, 2, 0, (2, 0, 0, 1))])  # fmt: skip
def test_without_output_shape_the_size_is_the_formula(
    stride: int, dilation: int, extra: int, padding: tuple[int, ...]
) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        t = ops.conv_transpose(popxl.variable(X), popxl.variable(W), (stride,) * 2, padding,
                               (dilation,) * 2, output_padding=(extra,) * 2)  # fmt: skip
    sizes = [
        stride * (X.shape[2 + i] - 1) + extra + (W.shape[2 + i] - 1) * dilation + 1
        - padding[i] - padding[2 + i]
        for i in range(2)
    ]  # fmt: skip
    assert t.shape == (1, 3, *sizes)


def test_a_negative_size_can_be_written() -> None:
    with popxl.Ir().main_graph:
        x, w = (popxl.variable(np.ones((1, 1, 2, 2), np.float32)) for _ in range(2))
        assert ops.conv_transpose(x, w, padding=(2, 2, 2, 2)).shape == (1, 1, -1, -1)
        zero = popxl.constant(0, popxl.int32)
        x, w = (ops.pow2scale_cast_to_fp8(t, zero, popxl.float8_143) for t in (x, w))
        scaled = ops.conv_transpose_pow2scaled(x, w, zero, padding=(2, 2, 2, 2))
        assert (scaled.shape, scaled.dtype) == ((1, 1, -1, -1), popxl.float16)


@pytest.mark.parametrize("op", [ops.conv_pow2scaled, ops.conv_transpose_pow2scaled])
def test_what_float8_convolutions_refuse(op: Any) -> None:
    with popxl.Ir().main_graph:
        full = popxl.variable(np.ones((1, 1, 2, 2), np.float32))
        zero = popxl.constant(0, popxl.int32)
        small = ops.pow2scale_cast_to_fp8(full, zero, popxl.float8_143)
        assert op(small, small, zero).dtype == popxl.float16
        for operands in ((full, full), (full, small), (small, full)):
            with pytest.raises(TypeError, match="float8"):
                op(*operands, zero)
        with pytest.raises(ValueError, match="scalar"):
            op(small, small, popxl.constant([0, 0], popxl.int32))
        for wrong in (popxl.constant(0.0), popxl.constant(0, popxl.uint32), 0):
            with pytest.raises(TypeError, match="int32"):
                op(small, small, wrong)
