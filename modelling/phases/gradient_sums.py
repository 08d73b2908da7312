"""Gradient accumulators in remote buffers, kept between passes over the layers of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import popxl
import popxl_addons as addons
from modelling.phases.buffers import store_gradient
from popxl import ops
from popxl_addons.remote import NamedRemoteBuffers, create_remote_buffer
from popxl_addons.utils import cast_if_needed
from popxl_addons.variable_factory import NamedVariableFactories


@dataclass(frozen=True)
class GradientSums:
    """Remote buffers of the gradient accumulators of a phase, one entry per layer.

    Accumulators are float32. Where the entries are narrower, each pass accumulates from zero, and
    its sum is added to the entry and rounded once.

    Attributes:
        facts: factories of the accumulators, by name.
        buffers: buffers of the accumulators, by name.
    """

    facts: NamedVariableFactories
    buffers: NamedRemoteBuffers

    @classmethod
    def create_buffers(
        cls,
        facts: NamedVariableFactories,
        reusable_buffers: Mapping[str, popxl.RemoteBuffer],
        dtypes: Mapping[str, popxl.dtype],
        num_layers: int,
    ) -> GradientSums:
        """Create remote buffers for the gradient accumulators of `num_layers` layers.

        Args:
            reusable_buffers: buffers that are unused until the last pass, by accumulator.
            dtypes: data types of entries, by accumulator; default: the accumulator's own.
        """
        buffers = {}
        for name, factory in facts.to_dict().items():
            if name not in reusable_buffers:
                dtype = dtypes.get(name, factory.dtype)
                spec = popxl.TensorSpec(factory.shape_on_replica, dtype)
                buffers[name] = create_remote_buffer(spec, num_layers, shard_over=1)
                buffers[name].kind = "gradients"
        return cls(facts, NamedRemoteBuffers.from_dict({**buffers, **reusable_buffers}))

    def load_accumulators(self, row: popxl.Tensor) -> addons.NamedTensors:
        """Load the gradient accumulators of layer `row`, before a pass that is not the first.

        They are the sums of the passes before, or zero where the entry is narrower than float32.
        """
        exact = {
            name: ops.remote_load(buffer, row, name=name)
            for name, buffer in self.buffers.to_dict().items()
            if not self._is_rounded(name)
        }
        zero = self.facts.filter_keys([n for n in self.buffers.keys_flat() if n not in exact])
        return addons.NamedTensors.from_dict({**zero.init_zero().to_dict(), **exact})

    def sum_over_passes(
        self, row: popxl.Tensor, accumulators: addons.NamedTensors
    ) -> addons.NamedTensors:
        """Sum layer `row`'s gradients over all passes of the step, in float32."""
        sums = {
            name: self._add_to_entry(name, row, accumulators)
            if self._is_rounded(name)
            else accumulators.get(name)
            for name in self.buffers.keys_flat()
        }
        return addons.NamedTensors.from_dict(sums)

    def store_accumulators(
        self, row: popxl.Tensor, accumulators: addons.NamedTensors, is_first: bool = False
    ) -> None:
        """Store the gradient accumulators of layer `row`, after a pass that is not the last.

        A narrower entry is added here, because the pass did not start from it.
        """
        for name, buffer in self.buffers.to_dict().items():
            adds = self._is_rounded(name) and not is_first
            total = self._add_to_entry(name, row, accumulators) if adds else accumulators.get(name)
            store_gradient(buffer, row, total)

    def _is_rounded(self, name: str) -> bool:
        """True if a gradient accumulator is stored in fewer bits than float32."""
        return self.buffers.get(name).tensor_dtype != popxl.float32

    def _add_to_entry(
        self, name: str, row: popxl.Tensor, accumulators: addons.NamedTensors
    ) -> popxl.Tensor:
        """Add this pass's gradient to the sum in the remote-buffer entry, in float32."""
        terms = ops.remote_load(self.buffers.get(name), row, name=name), accumulators.get(name)
        before, added = (cast_if_needed(t, popxl.float32) for t in terms)
        return before + added
