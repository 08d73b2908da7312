"""RMS norm and layer norm."""

from __future__ import annotations

import popxl
from modelling.layers.module import Module, cast_if_needed, parameter
from popxl import Tensor, ops


class RMSNorm(Module):
    """RMS norm over the last axis: x / sqrt(mean(x^2) + eps) * weight.

    Zhang and Sennrich, arXiv:1910.07467. Computed in float32, as in T5.

    Args:
        features: size of the last axis, unsharded.
        eps: added to the mean square.
        unit_offset: multiply by 1 + weight, as in Gemma.
        in_tp_region: True inside a tensor-parallel region, where each replica has a part of the
            weight's gradient.
    """

    def __init__(
        self, features: int, eps: float, unit_offset: bool = False, in_tp_region: bool = False
    ) -> None:
        super().__init__()
        self.eps, self.unit_offset, self.in_tp_region = eps, unit_offset, in_tp_region
        self.weight = parameter(features, std=0.0 if unit_offset else None)

    def build(self, x: Tensor) -> Tensor:
        """Normalizes x: (..., features) -> the same shape and dtype."""
        weight = self.scale()
        x_float32 = cast_if_needed(x, popxl.float32)
        normed = x_float32 * (1.0 / ops.sqrt(self.mean_square(x_float32) + self.eps))
        if self.unit_offset:
            return cast_if_needed(normed * (cast_if_needed(weight, popxl.float32) + 1.0), x.dtype)
        return cast_if_needed(normed, x.dtype) * weight

    def scale(self) -> Tensor:
        """Returns the multiplicative weight of the norm, (features,)."""
        return self.groups.copy_to_tp(self.weight) if self.in_tp_region else self.weight

    def mean_square(self, x: Tensor) -> Tensor:
        """Computes the mean of squares over features: (..., features) -> (..., 1)."""
        return ops.mean(x * x, -1, keepdims=True)


class ShardedRMSNorm(RMSNorm):
    """RMS norm over features that are sharded over tensor parallelism.

    Args:
        max_shards: of the features, see `parameter`.
    """

    def __init__(self, features: int, eps: float, max_shards: int) -> None:
        super().__init__(features, eps)
        self.features = features
        self.weight = parameter(features, shard=0, max_shards=max_shards)

    @property
    def _shard_replicas(self) -> int:
        return self._mappings["weight"].shard_replicas

    def scale(self) -> Tensor:
        return self.groups.sum_grad_over_shard_replicas(self.weight, self._shard_replicas)

    def mean_square(self, x: Tensor) -> Tensor:
        groups = self.groups
        total = groups.reduce_from_tp(ops.sum(x * x, -1, keepdims=True))
        return groups.copy_to_tp(total) / float(self.features * self._shard_replicas)


class LayerNorm(Module):
    """Layer norm over the last axis (arXiv:1607.06450): standardized x * weight + bias.

    Args:
        features: size of the last axis.
        eps: added to the variance.
    """

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(features)
        self.bias = parameter(features, std=0.0)

    def build(self, x: Tensor) -> Tensor:
        """Normalizes x: (..., features) -> the same shape and dtype."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)
