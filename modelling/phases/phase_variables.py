"""A phase's variables, optimizer state and gradients in remote buffers, sharded over replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

import popxl
import popxl_addons as addons
from config.model import QuantConfig
from modelling.phases.quantized_weights import DequantSpec, dequantize_variables, quantize_factories
from modelling.phases.settings import PhaseSettings
from popxl import ops
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.remote import NamedRemoteBuffers, create_remote_buffer, named_variable_buffers
from popxl_addons.rts import all_gather_replica_sharded_graph
from popxl_addons.variable_factory import NamedVariableFactories


@dataclass(frozen=True)
class PhaseVariables:
    """The variables a phase owns: where they are and how to bring them to the device.

    Attributes:
        facts: factories of what is stored: the variables, or the parts of those that are packed.
        buffers: their remote buffers; one entry for each layer of the phase.
        grads: buffers of gradients of those that are trained, sharded as the variables are.
        shard_groups: for each variable, the replicas it is sharded over (a group of 1: not).
        names: of what `load` and `gather` give.
        load: graph that loads the entry of a layer.
        gather: graph from what `load` gives to what is stored, whole.
        packed: the variables that are packed, by name.
        few_bits: how they are.
    """

    facts: NamedVariableFactories
    buffers: NamedRemoteBuffers
    grads: NamedRemoteBuffers
    shard_groups: dict[str, popxl.ReplicaGrouping]
    names: list[str]
    load: addons.GraphWithNamedArgs
    gather: addons.GraphWithNamedArgs
    quantized: Mapping[str, DequantSpec] = field(default_factory=dict)
    quant: QuantConfig | None = None
    _full: dict[str, popxl.RemoteBuffer] = field(default_factory=dict)

    @classmethod
    def create(
        cls,
        facts: NamedVariableFactories,
        phase: str,
        entries: int,
        settings: PhaseSettings,
        trainable: Sequence[str] = (),
    ) -> PhaseVariables:
        """Buffers and graphs for the variables of `facts`, of `entries` layers of a phase."""
        facts, in_few_bits = quantize_factories(facts, phase, settings)
        groupings = _cut_over(facts)
        shapes = {name: f.shape_on_replica for name, f in facts.to_dict().items()}
        over = {n: settings.shards(phase, n, shapes[n], groupings[n]) for n in shapes}
        alone = popxl.gir().replica_grouping(group_size=1)
        buffers = named_variable_buffers(facts, entries, over)
        dtype = settings.gradient_dtype
        grads = buffers.filter_keys(trainable).map(lambda b: _gradient_buffer(b, entries, dtype))
        label_buffers(buffers, "weights")
        label_buffers(grads, "gradients")
        load, names, gather = _loading(buffers, groupings)
        return cls(
            facts,
            buffers,
            grads,
            {n: groupings[n] if over[n] > 1 else alone for n in shapes},
            names,
            load,
            gather,
            in_few_bits,
            settings.config.model.quant,
        )

    def subset(self, names: Sequence[str]) -> PhaseVariables:
        """A store for a graph that needs no more than these; itself, if that is all there is."""
        if list(names) == self.names:
            return self
        wanted = self.facts.filter_keys(names)
        buffers = self.buffers.filter_keys(names)
        load, loaded_names, gather = _loading(buffers, _cut_over(wanted))
        return replace(
            self, facts=wanted, buffers=buffers, names=loaded_names, load=load, gather=gather
        )

    def of_variables(self, variables: Sequence[str]) -> PhaseVariables:
        """A store of these variables alone, by the names that a layer gives them."""
        return self.subset([n for n in self.names if _variable_of(n, self.quantized) in variables])

    def load_shards(
        self, row: popxl.Tensor, at_hand: Mapping[str, popxl.Tensor] | None = None
    ) -> addons.NamedTensors:
        """The variables of layer `row` as this replica stores them.

        Args:
            at_hand: those that need not be loaded, after an update.
        """
        missing = [name for name in self.names if name not in (at_hand or {})]
        if missing == self.names:
            return addons.NamedTensors.pack(self.names, self.load.call(row))
        loaded = self.subset(missing).load_shards(row).to_dict() if missing else {}
        shards = {**loaded, **(at_hand or {})}
        return addons.NamedTensors.from_dict({name: shards[name] for name in self.names})

    def load_dequantized(self, row: popxl.Tensor) -> addons.NamedTensors:
        """The variables of layer `row` as it takes them, gathered."""
        return self.dequantized(self.load_full(row))

    def load_full(
        self, row: popxl.Tensor, at_hand: Mapping[str, popxl.Tensor] | None = None
    ) -> addons.NamedTensors:
        """The variables of layer `row`, gathered as they are stored; see `load_shards`."""
        shards = self.load_shards(row, at_hand)
        return addons.NamedTensors.pack(self.names, self.gather.bind(shards).call())

    def store_gathered(self, row: popxl.Tensor, full: addons.NamedTensors) -> None:
        """Keep the gathered variables of layer `row` for the passes of this step."""
        for name, buffer in self._gathered().items():
            ops.remote_store(buffer, row, full.get(name))

    def load_gathered(self, row: popxl.Tensor) -> addons.NamedTensors:
        """Like `load_full`, from what `store_gathered` kept."""
        kept = {n: ops.remote_load(b, row) for n, b in self._gathered().items()}
        others = [name for name in self.names if name not in kept]
        loaded = self.subset(others).load_full(row).to_dict() if others else {}
        return addons.NamedTensors.from_dict({**loaded, **kept})

    def dequantized(self, full: addons.NamedTensors) -> addons.NamedTensors:
        """Variables as a layer takes them, of those that `load_full` gives."""
        return dequantize_variables(full, self.quantized, self.quant) if self.quant else full

    def _gathered(self) -> dict[str, popxl.RemoteBuffer]:
        """Buffers of full variables, for those that replicas share; made when first needed."""
        for name, buffer in self.buffers.to_dict().items():
            if buffer.meta_shape and name not in self._full:
                shape = self.facts.get(name).shape_on_replica
                full = popxl.remote_buffer(shape, buffer.tensor_dtype, buffer.entries)
                full.kind = "gathered weights"
                self._full[name] = full
        return {name: self._full[name] for name in self.names if name in self._full}

    def square_weight(self, name: str) -> float:
        """Weight of a replica's sum of squares of a gradient in the sum over all replicas.

        Replicas that hold the same elements each count their part.
        """
        group = self.facts.get(name).replica_grouping
        return self.shard_groups[name].group_size / group.group_size

    def gradient_variables(self, row: int, prefix: str) -> addons.NamedTensors:
        """Variables through which the host reads the gradients of layer `row`."""
        variables = {}
        for name, buffer in self.grads.to_dict().items():
            factory = self.facts.get(name)
            groups = factory.replica_grouping.num_groups
            shape = (*([groups] if groups > 1 else []), *factory.shape_on_replica)
            create = (
                popxl.remote_replica_sharded_variable
                if buffer.meta_shape
                else popxl.remote_variable
            )
            variables[name] = create(
                np.zeros(shape, buffer.tensor_dtype.as_numpy()),
                buffer,
                row,
                name=f"{prefix}.{name}",
                replica_grouping=factory.replica_grouping,
            )
        return addons.NamedTensors.from_dict(variables)


def _variable_of(stored: str, quantized: Mapping[str, DequantSpec]) -> str:
    """The variable that something stored is, or is a part of."""
    whole, _, _ = stored.rpartition(".")
    return whole if whole in quantized else stored


def label_buffers(buffers: NamedRemoteBuffers, kind: str) -> None:
    """Say what buffers hold; see `planning.hardware.disk_offload`."""
    for buffer in buffers.to_dict().values():
        buffer.kind = kind


def _cut_over(facts: NamedVariableFactories) -> dict[str, popxl.ReplicaGrouping]:
    """The replicas over which each variable may be cut, of those that hold it alike: within runs
    of neighbours where these have no constant stride, as PopXL does."""
    return {n: group.const_rg for n, group in facts.replica_groupings.to_dict().items()}


def _loading(
    buffers: NamedRemoteBuffers, groupings: Mapping[str, popxl.ReplicaGrouping]
) -> tuple[addons.GraphWithNamedArgs, list[str], addons.GraphWithNamedArgs]:
    """`VariableStore.load`, `names` and `gather` of some buffers."""
    load, names = addons.load_remote_graph(buffers)
    shards = addons.NamedTensors.pack(names, load.graph.outputs)
    gather, _ = all_gather_replica_sharded_graph(
        shards, replica_groups=NamedReplicaGrouping.from_dict(groupings)
    )
    return load, names, gather


def _gradient_buffer(
    buffer: popxl.RemoteBuffer, entries: int, dtype: popxl.dtype
) -> popxl.RemoteBuffer:
    spec = popxl.TensorSpec(buffer.tensor_shape, dtype, buffer.meta_shape)
    return create_remote_buffer(spec, entries, shard_over=1)
