"""Random matrices in few bits, of any size and magnitude: on devices as in numpy, and within half a
step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

import popxl
from popxl_addons.ops.group_quantize_decompress import (
    group_quantize_compress_numpy,
    group_quantize_decompress,
    group_quantize_decompress_numpy,
)
from tests.popxl.ops.harness import compile_quickly
from tests.popxl.programs import store
from tests.properties.settings import FAST, SLOW

RESULTS = (popxl.float32, popxl.float16, popxl.bfloat16)


@dataclass(frozen=True)
class Matrix:
    """A matrix that is packed.

    Attributes:
        magnitudes: powers of ten of its rows' standard deviations, the last of all further ones.
        offset: of its mean, in standard deviations.
        equal: whether each group has one value.
        dtype: of scale and bias.
    """

    lines: int
    groups: int
    size: int
    dim: int
    bits: int
    magnitudes: tuple[float, ...]
    offset: float
    equal: bool
    dtype: Any
    seed: int

    def values(self) -> np.ndarray:
        """(lines, groups * size)."""
        rng = np.random.default_rng(self.seed)
        x = rng.normal(self.offset, size=(self.lines, self.groups, self.size))
        x = np.repeat(x[..., :1], self.size, -1) if self.equal else x
        powers = [self.magnitudes[min(i, len(self.magnitudes) - 1)] for i in range(self.lines)]
        x = x * 10 ** np.array(powers)[:, None, None]
        return x.reshape(self.lines, -1).astype(np.float32)

    def check_errors(self, x: np.ndarray, scale: np.ndarray, kept: np.ndarray) -> None:
        """Each value is within half a scale, but for roundings, and scales are near to steps."""
        groups, kept = (t.astype(np.float64).reshape(self.lines, -1, self.size) for t in (x, kept))
        wide, levels = scale.astype(np.float64), 2**self.bits - 1
        low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
        most = np.abs(groups).max(-1, keepdims=True)
        if self.dtype == bfloat16:
            rounding = 4 * np.finfo(np.float32).eps * most
            allowed = (1 + 2**-7) * (high - low + 2**-7 * np.abs(low)) / levels
            assert (wide <= allowed * (1 + 1e-6)).all()
        else:  # the scale is rounded, which is used so many times, and each value and result
            half = np.finfo(np.float16)
            one = np.maximum(float(half.eps) / 2 * wide, float(half.smallest_subnormal) / 2)
            rounding = levels * one + 6 * np.maximum(
                float(half.eps) / 2 * most, float(half.smallest_subnormal) / 2
            )
        assert (np.abs(kept - groups) <= wide / 2 + rounding).all()


@st.composite
def matrices(draw: Any) -> Matrix:
    bits = draw(st.sampled_from([4, 8]))
    return Matrix(
        lines=draw(st.integers(1, 6)),
        groups=draw(st.integers(1, 4)),
        size=16 // bits * draw(st.integers(1, 9)),
        dim=draw(st.sampled_from([-1, 0])),
        bits=bits,
        magnitudes=tuple(draw(st.lists(st.floats(-8, 4), min_size=1, max_size=6))),
        offset=draw(st.sampled_from([0.0, 0.0, 3.0, -100.0])),
        equal=draw(st.sampled_from([False, False, False, True])),
        dtype=draw(st.sampled_from([bfloat16, np.float16])),
        seed=draw(st.integers(0, 2**16)),
    )


MATRICES = st.lists(matrices(), min_size=8, max_size=8)


def check(drawn: list[Matrix]) -> None:
    compile_quickly()
    # Numbers past 65504 become infinite in results of float16, by the definition.
    with np.errstate(over="ignore"):
        compare(drawn)


def compare(drawn: list[Matrix]) -> None:
    ir, expected = popxl.Ir(), {}
    with ir.main_graph:
        for matrix in drawn:
            x = matrix.values()
            given = np.moveaxis(x, -1, matrix.dim)
            setting = matrix.dim, matrix.bits
            try:
                parts = group_quantize_compress_numpy(given, matrix.size, *setting, matrix.dtype)
            except ValueError:
                # In float16, of a sum of 255 steps too.
                assert matrix.dtype == np.float16
                assert x.max() - x.min() > 65000 or np.abs(x).max() > 65000
                continue
            kept = group_quantize_decompress_numpy(*parts, *setting)
            matrix.check_errors(x, parts[1], np.moveaxis(kept, matrix.dim, -1))
            tensors = [popxl.variable(part) for part in parts]
            for dtype in RESULTS if matrix.dtype == bfloat16 else (None,):
                stream = store(group_quantize_decompress(*tensors, *setting, dtype))
                expected[stream] = kept.astype((dtype or popxl.float16).as_numpy()), matrix
    with popxl.Session(ir, "cpu") as session:
        found = session.run()
    for stream, (kept, matrix) in expected.items():
        np.testing.assert_array_equal(found[stream], kept, err_msg=str(matrix))


@FAST
@given(MATRICES)
def test_random_matrices_in_few_bits(drawn: list[Matrix]) -> None:
    check(drawn)


@pytest.mark.slow
@SLOW
@given(MATRICES)
def test_many_random_matrices_in_few_bits(drawn: list[Matrix]) -> None:
    check(drawn)
