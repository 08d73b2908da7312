"""Matmul with a constant sparse matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import popxl

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

__all__ = ["dense_const_sparse_matmul", "random_sparse"]


def random_sparse(dense: np.ndarray, density: float = 0.5) -> np.ndarray:
    """Zero random elements of `dense` in place; each is nonzero with probability `density`.

    It draws from numpy's global generator. At least one element is kept.

    Returns:
        `dense` itself; `scipy.sparse.csr_matrix` makes a sparse matrix of it.
    """
    draws = np.random.uniform(size=dense.shape)  # noqa: NPY002
    kept = draws < max(density, np.nextafter(draws.min(), 1))
    dense[~kept] = 0
    return dense


def dense_const_sparse_matmul(lhs: popxl.Tensor, rhs: csr_matrix, output_cols: int) -> popxl.Tensor:
    """Multiply a dense tensor by a constant sparse matrix: lhs @ rhs.

    The sparse matrix becomes a dense constant: the matrix units XLA compiles for are faster on
    zeros than gathers are without them, at the densities this op is used for.

    Args:
        lhs: (..., n), float16 or float32.
        rhs: (n, output_cols), of any float dtype.

    Raises:
        ValueError: `rhs` has another shape.
        RuntimeError: `lhs` is neither float16 nor float32.
    """
    if lhs.dtype not in (popxl.float16, popxl.float32):
        raise RuntimeError(
            f"dense_const_sparse_matmul takes float16 and float32, but {lhs.id!r} is "
            f"{lhs.dtype.name}"
        )
    if rhs.shape != (lhs.shape[-1], output_cols):
        raise ValueError(
            f"dense_const_sparse_matmul of {lhs.shape} to {output_cols} columns needs a matrix "
            f"{(lhs.shape[-1], output_cols)}, but got {rhs.shape}"
        )
    return lhs @ popxl.constant(rhs.toarray(), lhs.dtype, "sparse")
