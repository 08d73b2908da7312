"""Linear layers, sharded over tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from modelling.layers.lora import LinearAdapters
from modelling.layers.module import Module, fused_parameter, parameter
from modelling.weights.weight_mapping import Weight, WeightMapping
from popxl import Tensor, ops
from popxl_addons.matrix_product import create_matrix_product

Shard = Literal["in", "out"]
_AXIS = {"in": 0, "out": 1}


class Linear(Module):
    """Tensor-parallel linear layer (Shoeybi et al., arXiv:1909.08053): y = x @ weight + bias.

    The product is in FP8 if the layer is created in `popxl_addons.fp8_autocast`.

    Args:
        shard: the features that are sharded over tensor parallelism: "out" (column-parallel), so
            that y is sharded, or "in" (row-parallel), so that x is, and y is summed over replicas.
        std: of the initial weights.
        max_shards: see `parameter`; the replicas with the same shard of the output features each
            use it for a part of the work.
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
        self.shard, self.has_bias, self.product = shard, bias, create_matrix_product()
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

    def is_quantizable(self, mapping: WeightMapping) -> bool:
        return mapping.path == "weight"

    def build(self, x: Tensor) -> Tensor:
        """Applies the layer: (..., in_features) -> (..., out_features); a sharded size is local."""
        if self.shard == "in":
            y = self.groups.reduce_from_tp(self.partial_sum(x))
            return y + self.bias if self.has_bias else y
        # The sum of gradients over the replicas of a shard enters the product's gradient, so that
        # FP8 rounds the same for every tensor parallelism.
        groups, replicas = self.groups, self._mappings["weight"].shard_replicas
        x, weight = groups.scale_grad_by_shard_replicas(x, replicas), self.weight
        bias = self.bias if self.has_bias else None
        y = self.product(x, weight, bias)
        y = self._apply_adapters(x, y, weight, bias)
        return groups.sum_grad_over_shard_replicas(y, replicas)

    def partial_sum(self, x: Tensor) -> Tensor:
        """Computes this replica's term of the sum over replicas, if input features are sharded.

        Without the bias: (..., local in_features) -> (..., out_features).
        """
        weight = self.weight
        return self._apply_adapters(x, self.product(x, weight, None), weight, None)

    def _apply_adapters(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return y if self.adapters is None else self.adapters(x, y, weight, bias)


class FusedLinear(Linear):
    """Column-parallel linear layers with the same input, as one matmul, such as q, k and v.

    In files they are modules beside this one.

    Args:
        out_features: of each.
        std: of the initial weights of each, by its name in the Hugging Face model.
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
        """Applies all fused layers: (..., in_features) -> one (..., local out_features) each."""
        return ops.split(super().build(x), self.count, axis=-1)
