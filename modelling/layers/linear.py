"""Linear maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from modelling.layers.lora import LinearAdapters
from modelling.layers.module import Module, fused_parameter, parameter
from modelling.weights.mapping import Weight, WeightMapping
from popxl import Tensor, ops
from popxl_addons.fp8 import matrix_product

Shard = Literal["in", "out"]
_AXIS = {"in": 0, "out": 1}


class Linear(Module):
    """y = x @ weight + bias in a tensor-parallel computation (Shoeybi et al., arXiv:1909.08053).

    The product is an FP8 one if the layer is made in `popxl_addons.fp8_autocast`.

    Args:
        shard: which features are sharded over tensor parallelism: "out", so that each replica gets
            its part of y, or "in", so that y is the sum over replicas.
        std: of the initial weights.
        max_shards: see `parameter`; replicas that hold the same shard of the output features use
            it for a part of the work each.
    """

    adapters: LinearAdapters | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        shard: Shard,
        std: float,
        bias: bool = False,
        max_shards: int | None = None,
        hf_name: str | None = None,
    ) -> None:
        super().__init__(hf_name)
        self.shard, self.has_bias, self.product = shard, bias, matrix_product()
        self.weight = parameter(
            out_features,
            in_features,
            std=std,
            shard=_AXIS[shard],
            max_shards=max_shards,
            transposed=True,
        )
        if bias:
            axis = 0 if shard == "out" else None
            self.bias = parameter(out_features, std=0.0, shard=axis, max_shards=max_shards)

    def is_quantizable(self, row: WeightMapping) -> bool:
        return row.path == "weight"

    def build(self, x: Tensor) -> Tensor:
        """x: (..., in_features) -> (..., out_features); the sharded ones are a replica's."""
        if self.shard == "in":
            y = self.groups.reduce_from_tp(self.partial(x))
            return y + self.bias if self.has_bias else y
        # The sum of gradients over the replicas of a shard enters the product's, so that FP8 rounds
        # the same for every tensor parallelism.
        groups, replicas = self.groups, self._rows["weight"].shard_replicas
        x, matrix = groups.scale_grad_by_shard_replicas(x, replicas), self.weight
        bias = self.bias if self.has_bias else None
        y = self.product(x, matrix, bias)
        return groups.sum_grad_over_shard_replicas(self._adapted(x, y, matrix, bias), replicas)

    def partial(self, x: Tensor) -> Tensor:
        """With `shard` "in" this replica's part of the sum, without the bias."""
        matrix = self.weight
        return self._adapted(x, self.product(x, matrix, None), matrix, None)

    def _adapted(self, x: Tensor, y: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        return y if self.adapters is None else self.adapters(x, y, matrix, bias)


class FusedLinear(Linear):
    """Several linear maps of one input as one product. In files they are modules beside this one.

    Args:
        out_features: of each.
        std: of the initial weights of each, by its name in Hugging Face's model.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        std: Mapping[str, float],
        *,
        bias: bool = False,
        max_shards: int | None = None,
    ) -> None:
        super().__init__(in_features, out_features, shard="out", std=0.0, hf_name="")
        self.has_bias, self.count, shape = bias, len(std), (out_features, in_features)
        weights = [Weight(f"{name}.weight", shape, s) for name, s in std.items()]
        self.weight = fused_parameter(weights, 1, max_shards, transposed=True)
        if bias:
            biases = [Weight(f"{name}.bias", shape[:1], 0.0) for name in std]
            self.bias = fused_parameter(biases, 0, max_shards)

    def build(self, x: Tensor) -> Sequence[Tensor]:  # type: ignore[override]
        """x: (..., in_features) -> for each map (..., out_features on a replica)."""
        return ops.split(super().build(x), self.count, axis=-1)
