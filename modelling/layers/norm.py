"""Normalisations."""

from __future__ import annotations

import popxl
from modelling.layers.layer import Layer, cast
from popxl import Tensor, ops


class RMSNorm(Layer):
    """Divide by the root of the mean square over the last axis, then scale.

    Zhang and Sennrich, arXiv:1910.07467. Computed in float32, as T5 does.

    Variables: `weight` (features,), the same on all replicas.
    """

    def __init__(self, eps: float) -> None:
        """Args: `eps`: added to the mean square."""
        super().__init__()
        self.eps = eps

    def build(self, x: Tensor) -> Tensor:
        """x: (..., features) -> the same shape and dtype."""
        weight = self.weight("weight", x.shape[-1:], x.dtype)
        wide = cast(x, popxl.float32)
        mean_square = ops.mean(wide * wide, -1, keepdims=True)
        return cast(wide * (1.0 / ops.sqrt(mean_square + self.eps)), x.dtype) * weight


class LayerNorm(Layer):
    """Normalise the last axis to mean 0 and variance 1, then scale and shift (arXiv:1607.06450).

    Variables: `weight` and `bias` (features,), the same on all replicas.
    """

    def __init__(self, eps: float) -> None:
        """Args: `eps`: added to the variance."""
        super().__init__()
        self.eps = eps

    def build(self, x: Tensor) -> Tensor:
        """x: (..., features) -> the same shape and dtype."""
        weight, bias = (self.weight(n, x.shape[-1:], x.dtype) for n in ("weight", "bias"))
        return ops.layer_norm(x, weight, bias, self.eps)
