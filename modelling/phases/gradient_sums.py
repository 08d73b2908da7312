"""Sums of gradients between the passes of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.remote import NamedRemoteBuffers, create_remote_buffer
from popxl_addons.variable_factory import NamedVariableFactories


def to_float32(t: popxl.Tensor) -> popxl.Tensor:
    """A tensor in float32."""
    # A cast to the same type would be a segment of its own, and a copy.
    return t if t.dtype == popxl.float32 else ops.cast(t, popxl.float32)


@dataclass(frozen=True)
class GradientSums:
    """Where a phase keeps its accumulators while other layers run, one entry for each layer.

    Sums are float32. An entry has the type of its buffer: where that is narrower, a pass has a sum
    of its own, which is added and rounded once.

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

    def load_accumulators(self, row: popxl.Tensor) -> addons.NamedTensors:
        """Accumulators for a further pass over layer `row`, as the pass before left them, or zero
        where the entry is narrower."""
        exact = {
            name: ops.remote_load(buffer, row, name=name)
            for name, buffer in self.buffers.to_dict().items()
            if not self._rounds(name)
        }
        zero = self.facts.filter_keys([n for n in self.buffers.keys_flat() if n not in exact])
        return addons.NamedTensors.from_dict({**zero.init_zero().to_dict(), **exact})

    def total(self, row: popxl.Tensor, accumulators: addons.NamedTensors) -> addons.NamedTensors:
        """Float32 sums for layer `row` after the last pass."""
        sums = {
            name: self._sum(name, row, accumulators)
            if self._rounds(name)
            else accumulators.get(name)
            for name in self.buffers.keys_flat()
        }
        return addons.NamedTensors.from_dict(sums)

    def store(
        self, row: popxl.Tensor, accumulators: addons.NamedTensors, is_first: bool = False
    ) -> None:
        """Keep the sums of layer `row` after a pass for the next one.

        A narrower entry is added here: a pass that began with it would read it, and add to it, once
        more.
        """
        for name, buffer in self.buffers.to_dict().items():
            adds = self._rounds(name) and not is_first
            total = self._sum(name, row, accumulators) if adds else accumulators.get(name)
            ops.remote_store(buffer, row, addons.round_by_hash(total, buffer.tensor_dtype))

    def _rounds(self, name: str) -> bool:
        """True if the entries of an accumulator are rounded."""
        return self.buffers.get(name).tensor_dtype != popxl.float32

    def _sum(self, name: str, row: popxl.Tensor, accumulators: addons.NamedTensors) -> popxl.Tensor:
        """The sum of an entry and of the pass's gradient, in float32."""
        before = ops.remote_load(self.buffers.get(name), row, name=name)
        return to_float32(before) + to_float32(accumulators.get(name))
