"""Product with a matrix whose sparsity is known when the program is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import popxl

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

__all__ = ["dense_const_sparse_matmul", "random_sparse"]


def random_sparse(dense: np.ndarray, density: float = 0.5) -> csr_matrix:
    """A sparse matrix that keeps each element of `dense` with probability `density`.

    It draws from numpy's global generator.
    """
    from scipy.sparse import csr_matrix

    kept = np.random.uniform(size=dense.shape) < density  # noqa: NPY002
    return csr_matrix(np.where(kept, dense, 0))


def dense_const_sparse_matmul(lhs: popxl.Tensor, rhs: csr_matrix, output_cols: int) -> popxl.Tensor:
    """lhs @ rhs.

    The sparse matrix becomes a dense constant: the matrix units XLA compiles for are faster on
    zeros than gathers are without them, at the densities this op is used for.

    Args:
        lhs: (..., n).
        rhs: (n, output_cols).

    Raises:
        ValueError: `rhs` has another shape.
    """
    if rhs.shape != (lhs.shape[-1], output_cols):
        raise ValueError(
            f"dense_const_sparse_matmul of {lhs.shape} to {output_cols} columns needs a matrix "
            f"{(lhs.shape[-1], output_cols)}, but got {rhs.shape}"
        )
    return lhs @ popxl.constant(rhs.toarray(), lhs.dtype, "sparse")
