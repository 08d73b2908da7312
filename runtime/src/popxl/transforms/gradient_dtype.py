"""Dtype of the gradients of FP8 matmuls' weights, for accumulators that are wider than weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from popxl import dtypes

_dtype: ContextVar[dtypes.dtype | None] = ContextVar("weight_gradient_dtype", default=None)


@contextmanager
def accumulate_weight_gradients_in(dtype: dtypes.dtype | None) -> Iterator[None]:
    """Context in which FP8 matmuls give the gradients of weights in `dtype`, unrounded.

    A product in the accumulator's dtype adds to it as it is written, on GPUs: cublasLt's C += A B.

    Args:
        dtype: None: that of the weight.
    """
    token = _dtype.set(dtype)
    try:
        yield
    finally:
        _dtype.reset(token)


def weight_gradient_dtype(default: dtypes.dtype) -> dtypes.dtype:
    """Returns the dtype in which an FP8 matmul gives the gradient of its weight."""
    return _dtype.get() or default
