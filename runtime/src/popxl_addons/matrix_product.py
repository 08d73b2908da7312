"""The matmul of linear layers, which a context such as `fp8_autocast` replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import popxl
from popxl import ops
from popxl_addons.module import Module


class MatrixProduct(Module):
    """Module of a linear layer's matmul: x @ weight + bias."""

    def build(
        self,
        x: popxl.Tensor,
        weight: popxl.Tensor,
        bias: popxl.Tensor | None = None,
        output_type: popxl.dtype | None = None,
    ) -> popxl.Tensor:
        """Multiply x (..., in_features) by weight (in_features, out_features) and add the bias.

        Args:
            bias: (out_features,), in the dtype of the result.
            output_type: dtype of the result; default: that of x.
        """
        y = ops.matmul(x, weight, output_type=output_type)
        return y if bias is None else y + bias


_create: ContextVar[Callable[[], MatrixProduct]] = ContextVar(
    "create_matrix_product", default=MatrixProduct
)


@contextmanager
def use_matrix_products(create: Callable[[], MatrixProduct]) -> Iterator[None]:
    """Context in which new linear layers take the matmul module that `create` returns."""
    token = _create.set(create)
    try:
        yield
    finally:
        _create.reset(token)


def create_matrix_product() -> MatrixProduct:
    """Create the matmul module of a new linear layer: in FP8 inside `fp8_autocast`."""
    return _create.get()()
