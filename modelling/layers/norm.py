"""Normalisations."""

from __future__ import annotations

import popxl
from modelling.layers.layer import Layer, cast
from modelling.layers.parallel import Groups
from popxl import Tensor, ops


class RMSNorm(Layer):
    """Divide by the root of the mean square over the last axis, then scale.

    Zhang and Sennrich, arXiv:1910.07467. Computed in float32, as T5 does.

    Variables: `weight` (features,), the same on all replicas.

    Args:
        eps: added to the mean square.
        from_one: scale by 1 + weight, as Gemma does.
        groups: if the norm is inside a sharded computation, where each replica has its part of the
            gradient of the weight.
    """

    def __init__(self, eps: float, from_one: bool = False, groups: Groups | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.from_one = from_one
        self.groups = groups

    def build(self, x: Tensor) -> Tensor:
        """x: (..., features) -> the same shape and dtype."""
        weight = self.scale(x)
        wide = cast(x, popxl.float32)
        normalised = wide * (1.0 / ops.sqrt(self.mean_square(wide) + self.eps))
        if self.from_one:
            return cast(normalised * (cast(weight, popxl.float32) + 1.0), x.dtype)
        return cast(normalised, x.dtype) * weight

    def scale(self, x: Tensor) -> Tensor:
        """The weight."""
        weight = self.weight("weight", x.shape[-1:], x.dtype)
        return weight if self.groups is None else self.groups.copy_to_tp(weight)

    def mean_square(self, x: Tensor) -> Tensor:
        """The mean of squares over the last axis, which stays with length 1."""
        return ops.mean(x * x, -1, keepdims=True)


class ShardedRMSNorm(RMSNorm):
    """An `RMSNorm` over features that are cut over tensor parallelism, inside a sharded
    computation.

    Variables: `weight` (features on this replica,), cut likewise.

    Args:
        features: of the whole axis.
        groups: whose members have the parts.
        holders: neighbours that have the same part, see `Groups.holders`.
    """

    def __init__(self, eps: float, features: int, groups: Groups, holders: int = 1) -> None:
        super().__init__(eps, groups=groups)
        self.features = features
        self.group = groups
        self.holders = holders

    def scale(self, x: Tensor) -> Tensor:
        grouping = self.group.held_by(self.holders)
        weight = self.weight("weight", x.shape[-1:], x.dtype, grouping)
        return self.group.open_held(weight, self.holders)

    def mean_square(self, x: Tensor) -> Tensor:
        total = self.group.reduce_from_tp(ops.sum(x * x, -1, keepdims=True))
        return self.group.copy_to_tp(total) / float(self.features * self.holders)


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
