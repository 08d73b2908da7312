"""Normalisations."""

from __future__ import annotations

import popxl
from modelling.layers.module import Module, cast, parameter
from popxl import Tensor, ops


class RMSNorm(Module):
    """Divide by the root of the mean square over the last axis, then scale.

    Zhang and Sennrich, arXiv:1910.07467. Computed in float32, as T5 does.

    Args:
        features: of the last axis, in full.
        eps: added to the mean square.
        unit_offset: scale by 1 + weight, as Gemma does.
        in_sharded: whether it is inside a tensor-parallel computation, where each replica has its
            part of the gradient of the weight.
    """

    def __init__(
        self, features: int, eps: float, unit_offset: bool = False, in_tp_region: bool = False
    ) -> None:
        super().__init__()
        self.eps, self.unit_offset, self.in_tp_region = eps, unit_offset, in_tp_region
        self.weight = parameter(features, std=0.0 if unit_offset else None)

    def build(self, x: Tensor) -> Tensor:
        """x: (..., features) -> the same shape and dtype."""
        weight = self.scale()
        wide = cast(x, popxl.float32)
        normalised = wide * (1.0 / ops.sqrt(self.mean_square(wide) + self.eps))
        if self.unit_offset:
            return cast(normalised * (cast(weight, popxl.float32) + 1.0), x.dtype)
        return cast(normalised, x.dtype) * weight

    def scale(self) -> Tensor:
        """The weight, (features,)."""
        return self.groups.copy_to_tp(self.weight) if self.in_tp_region else self.weight

    def mean_square(self, x: Tensor) -> Tensor:
        """The mean of squares over the last axis, which stays with length 1."""
        return ops.mean(x * x, -1, keepdims=True)


class ShardedRMSNorm(RMSNorm):
    """An `RMSNorm` over features that are sharded over tensor parallelism, inside such a
    computation.

    Args:
        max_shards: of the features, see `parameter`.
    """

    def __init__(self, features: int, eps: float, max_shards: int) -> None:
        super().__init__(features, eps)
        self.features = features
        self.weight = parameter(features, shard=0, max_shards=max_shards)

    @property
    def _shard_replicas(self) -> int:
        return self._rows["weight"].shard_replicas

    def scale(self) -> Tensor:
        return self.groups.sum_grad_over_shard_replicas(self.weight, self._shard_replicas)

    def mean_square(self, x: Tensor) -> Tensor:
        groups = self.groups
        total = groups.reduce_from_tp(ops.sum(x * x, -1, keepdims=True))
        return groups.copy_to_tp(total) / float(self.features * self._shard_replicas)


class LayerNorm(Module):
    """Normalise the last axis to mean 0 and variance 1, then scale and shift (arXiv:1607.06450)."""

    def __init__(self, features: int, eps: float) -> None:
        """Args: `eps`: added to the variance."""
        super().__init__()
        self.eps = eps
        self.weight = parameter(features)
        self.bias = parameter(features, std=0.0)

    def build(self, x: Tensor) -> Tensor:
        """x: (..., features) -> the same shape and dtype."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)
