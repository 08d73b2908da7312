"""Sums of gradients between the passes of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.remote import NamedRemoteBuffers, create_remote_buffer
from popxl_addons.variable_factory import NamedVariableFactories


@dataclass(frozen=True)
class GradientSums:
    """Where a phase keeps its accumulators while other layers run, one entry for each layer.

    Within a pass, accumulators are float32. An entry has the type of its buffer: values are rounded
    once a pass where that is narrower.

    Attributes:
        facts: factories of the accumulators, by name.
        buffers: their buffers, by the same names.
    """

    facts: NamedVariableFactories
    buffers: NamedRemoteBuffers

    @classmethod
    def create(
        cls,
        facts: NamedVariableFactories,
        at_hand: Mapping[str, popxl.RemoteBuffer],
        dtypes: Mapping[str, popxl.dtype],
        entries: int,
    ) -> GradientSums:
        """Buffers for the accumulators of `entries` layers.

        Args:
            at_hand: buffers that are free until the last pass, by accumulator.
            dtypes: types of entries, by accumulator; default: the accumulator's.
        """
        buffers = {}
        for name, factory in facts.to_dict().items():
            if name not in at_hand:
                dtype = dtypes.get(name, factory.dtype)
                spec = popxl.TensorSpec(factory.shape_on_replica, dtype)
                buffers[name] = create_remote_buffer(spec, entries, shard_over=1)
                buffers[name].kind = "gradients"
        return cls(facts, NamedRemoteBuffers.from_dict({**buffers, **at_hand}))

    def load(self, row: popxl.Tensor) -> addons.NamedTensors:
        """Accumulators of layer `row` as the pass before left them."""
        loaded = {}
        for name, buffer in self.buffers.to_dict().items():
            entry, dtype = ops.remote_load(buffer, row, name=name), self.facts.get(name).dtype
            # A cast to the same type would be a segment of its own, and a copy.
            loaded[name] = entry if entry.dtype == dtype else ops.cast(entry, dtype)
        return addons.NamedTensors.from_dict(loaded)

    def store(self, row: popxl.Tensor, accumulators: addons.NamedTensors) -> None:
        """Keep the accumulators of layer `row` for the next pass."""
        for name, buffer in self.buffers.to_dict().items():
            total = addons.rounded_by_hash(accumulators.get(name), buffer.tensor_dtype)
            ops.remote_store(buffer, row, total)
