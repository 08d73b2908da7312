"""FP8 state (scales and amax histories) of a phase's linear layers, in remote buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

import popxl
import popxl_addons as addons
from modelling.fp8 import make_fp8_recipe
from modelling.phases.settings import PhaseSettings
from popxl import ops
from popxl.ops.fp8_e4m3_e5m2 import OPERANDS
from popxl_addons.fp8 import SCALE, DelayedScaling, names_of_fp8_products
from popxl_addons.remote import (
    NamedRemoteBuffers,
    load_remote,
    named_variable_buffers,
    store_remote,
)
from popxl_addons.variable_factory import NamedVariableFactories


@dataclass(frozen=True)
class FP8State:
    """FP8 state of a phase's matmuls, equal on all replicas; one buffer entry per layer.

    The loss of a micro-batch is weighted like that of the whole global batch (`LOSS_WEIGHT`), so
    its gradients grow with the number of micro-batches. The state holds amaxes and scales of the
    gradients of the global batch's loss, which do not depend on how the global batch is split.

    Attributes:
        facts: factories of the variables.
        products: names of the matrix products.
        buffers: remote buffers of the variables.
        amaxes: buffer of the amaxes observed in a step, (products * 3,).
        micro_batches: number of micro-batches of a global batch.
    """

    recipe: DelayedScaling
    facts: NamedVariableFactories
    products: list[str]
    buffers: NamedRemoteBuffers
    amaxes: popxl.RemoteBuffer
    micro_batches: int

    @classmethod
    def create_buffers(
        cls, facts: NamedVariableFactories, num_layers: int, settings: PhaseSettings
    ) -> FP8State | None:
        """Create remote buffers for the FP8 variables among `facts`; None if there are none."""
        recipe, state = make_fp8_recipe(settings.config), facts.of_kind("fp8")
        if not isinstance(recipe, DelayedScaling) or not state.keys():
            return None
        products = names_of_fp8_products(state)
        amaxes = popxl.remote_buffer((len(products) * len(OPERANDS),), popxl.float32, num_layers)
        micro_batches = settings.num_micro_batches * settings.groups.data_parallel
        buffers = named_variable_buffers(state, num_layers)
        return cls(recipe, state, products, buffers, amaxes, micro_batches)

    def load_scales(self, row: popxl.Tensor) -> dict[str, popxl.Tensor]:
        """Load layer `row`'s FP8 scales by name; those of gradients fit the global batch's loss."""
        return load_remote(self.buffers.filter_keys(self._scale_names), row).to_dict()

    def adapt_scales(self, state: Mapping[str, popxl.Tensor]) -> dict[str, popxl.Tensor]:
        """A layer's FP8 scales; those of gradients are adapted to the loss of one micro-batch."""
        scales_by_name = {name: state[name] for name in self._scale_names}
        if self.micro_batches == 1:
            return scales_by_name
        gradient_share = self._micro_batch_shares()
        return {name: scale * gradient_share for name, scale in scales_by_name.items()}

    @property
    def _scale_names(self) -> list[str]:
        return [f"{name}.{SCALE}" for name in self.products]

    def store_amaxes(self, row: popxl.Tensor, accumulators: addons.NamedTensors) -> None:
        """Store the operands' amaxes of layer `row`, reduced by maximum over all replicas."""
        observed = [accumulators.get(f"accum.{name}.{SCALE}") for name in self.products]
        gradient_share = self._micro_batch_shares()
        amaxes = ops.concat([amax * gradient_share for amax in observed])
        largest = ops.collectives.replicated_all_reduce(amaxes, "max")
        ops.remote_store(self.amaxes, row, largest)

    def update_scales(self, row: popxl.Tensor, norm: popxl.Tensor) -> dict[str, popxl.Tensor]:
        """Update layer `row`'s FP8 scales and histories, unless the gradient norm is not finite.

        Returns:
            The new state by name.
        """
        is_finite = ops.isfinite(norm)
        amaxes = ops.split(ops.remote_load(self.amaxes, row), len(self.products))
        state = load_remote(self.buffers, row)
        new = {}
        for name, amax in zip(self.products, amaxes, strict=True):
            old = state.get(name)
            for key, t in self.recipe.update(old, amax).to_dict().items():
                new[f"{name}.{key}"] = ops.where(is_finite, t, old.get(key))
        store_remote(self.buffers, addons.NamedTensors.from_dict(new), row)
        return new

    def _micro_batch_shares(self) -> popxl.Tensor:
        """A micro-batch's share of a matmul's operands, (3,): of all for the gradient, else 1."""
        factors = [1 / self.micro_batches if name == "gradient" else 1.0 for name in OPERANDS]
        return popxl.constant(np.asarray(factors), popxl.float32, "micro_batch_share")
