"""A phase's variables, optimizer state and gradients in remote buffers, sharded over replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

import popxl
import popxl_addons as addons
from config.model import QuantConfig
from modelling.phases.settings import PhaseSettings
from popxl import ops
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.remote import NamedRemoteBuffers, create_remote_buffer, named_variable_buffers
from popxl_addons.rts import all_gather_replica_sharded_graph
from popxl_addons.variable_factory import NamedVariableFactories

if TYPE_CHECKING:
    from modelling.phases.quantized_weights import DequantSpec


@dataclass(frozen=True)
class PhaseVariables:
    """Variables of a phase in remote buffers, with the graphs that load and all-gather them.

    Attributes:
        facts: factories of the stored tensors: variables, or the fields of quantized ones.
        buffers: remote buffers of the stored tensors, with one entry per layer of the phase.
        grads: buffers of the gradients of trainable variables, sharded like the variables.
        shard_groups: replicas that each variable is sharded over; a group of 1 if it is not.
        names: names of the outputs of `load_graph` and `gather_graph`.
        load_graph: graph that loads the shards of a layer.
        gather_graph: graph that gathers loaded shards to full tensors.
        quantized: the quantized variables by name.
        quant: their quantization.
    """

    facts: NamedVariableFactories
    buffers: NamedRemoteBuffers
    grads: NamedRemoteBuffers
    shard_groups: dict[str, popxl.ReplicaGrouping]
    names: list[str]
    load_graph: addons.GraphWithNamedArgs
    gather_graph: addons.GraphWithNamedArgs
    quantized: Mapping[str, DequantSpec] = field(default_factory=dict)
    quant: QuantConfig | None = None
    _full_buffers: dict[str, popxl.RemoteBuffer] = field(default_factory=dict)

    @classmethod
    def create_buffers(
        cls,
        facts: NamedVariableFactories,
        phase: str,
        num_layers: int,
        settings: PhaseSettings,
        trainable: Sequence[str] = (),
    ) -> PhaseVariables:
        """Create buffers and graphs for the variable factories `facts`, for `num_layers` layers.

        Args:
            trainable: names of the variables that have gradients.
        """
        quantized: dict[str, DequantSpec] = {}
        if settings.config.model.quant is not None:
            from modelling.phases.quantized_weights import quantize_factories

            facts, quantized = quantize_factories(facts, phase, settings)
        groupings = _shard_groups(facts)
        shapes = {name: f.shape_on_replica for name, f in facts.to_dict().items()}
        shards = {n: settings.num_shards(phase, n, shapes[n], groupings[n]) for n in shapes}
        single = popxl.gir().replica_grouping(group_size=1)
        buffers = named_variable_buffers(facts, num_layers, shards)
        dtype = settings.gradient_dtype
        grads = buffers.filter_keys(trainable).map(
            lambda b: _create_gradient_buffer(b, num_layers, dtype)
        )
        label_buffers(buffers, "weights")
        label_buffers(grads, "gradients")
        load, names, gather = _build_load_and_gather_graphs(buffers, groupings)
        return cls(
            facts,
            buffers,
            grads,
            {n: groupings[n] if shards[n] > 1 else single for n in shapes},
            names,
            load,
            gather,
            quantized,
            settings.config.model.quant,
        )

    def select_stored(self, names: Sequence[str]) -> PhaseVariables:
        """Returns these variables with the named stored tensors only; `self` if these are all."""
        if list(names) == self.names:
            return self
        facts, buffers = self.facts.filter_keys(names), self.buffers.filter_keys(names)
        load, loaded, gather = _build_load_and_gather_graphs(buffers, _shard_groups(facts))
        subset = replace(self, facts=facts, buffers=buffers)
        return replace(subset, names=loaded, load_graph=load, gather_graph=gather)

    def select_variables(self, names: Sequence[str]) -> PhaseVariables:
        """Returns these variables with the named ones only, and all fields of quantized ones."""
        return self.select_stored(
            [n for n in self.names if _variable_name(n, self.quantized) in names]
        )

    def load_shards(
        self, row: popxl.Tensor, updated: Mapping[str, popxl.Tensor] | None = None
    ) -> addons.NamedTensors:
        """Load this replica's shards of the variables of layer `row`.

        Args:
            updated: shards that are on the device after an update, and are not loaded.
        """
        missing = [name for name in self.names if name not in (updated or {})]
        if missing == self.names:
            return addons.NamedTensors.pack(self.names, self.load_graph.call(row))
        loaded = self.select_stored(missing).load_shards(row).to_dict() if missing else {}
        shards = {**loaded, **(updated or {})}
        return addons.NamedTensors.from_dict({name: shards[name] for name in self.names})

    def load_full(
        self, row: popxl.Tensor, updated: Mapping[str, popxl.Tensor] | None = None
    ) -> addons.NamedTensors:
        """Load and all-gather the stored tensors of layer `row`; `updated` as for `load_shards`."""
        shards = self.load_shards(row, updated)
        return addons.NamedTensors.pack(self.names, self.gather_graph.bind(shards).call())

    def store_gathered(self, row: popxl.Tensor, full: addons.NamedTensors) -> None:
        """Store layer `row`'s gathered tensors, for the other passes of the same optimizer step."""
        for name, buffer in self._gathered_buffers().items():
            ops.remote_store(buffer, row, full.get(name))

    def load_gathered(self, row: popxl.Tensor) -> addons.NamedTensors:
        """Load the gathered tensors that `store_gathered` stored; equal to `load_full`."""
        gathered = {n: ops.remote_load(b, row) for n, b in self._gathered_buffers().items()}
        missing = [name for name in self.names if name not in gathered]
        loaded = self.select_stored(missing).load_full(row).to_dict() if missing else {}
        return addons.NamedTensors.from_dict({**loaded, **gathered})

    def dequantize(self, full: addons.NamedTensors) -> addons.NamedTensors:
        """Dequantize the tensors that `load_full` returns."""
        if not self.quant:
            return full
        from modelling.phases.quantized_weights import dequantize_variables

        return dequantize_variables(full, self.quantized, self.quant)

    def _gathered_buffers(self) -> dict[str, popxl.RemoteBuffer]:
        """Remote buffers for gathered copies of sharded variables, created on first use."""
        for name, buffer in self.buffers.to_dict().items():
            if buffer.meta_shape and name not in self._full_buffers:
                shape = self.facts.get(name).shape_on_replica
                full = popxl.remote_buffer(shape, buffer.tensor_dtype, buffer.entries)
                full.kind = "gathered weights"
                self._full_buffers[name] = full
        return {n: self._full_buffers[n] for n in self.names if n in self._full_buffers}

    def sum_squares_weight(self, name: str) -> float:
        """Weight of a replica's squares in a sum over all replicas, as several hold equal elements.

        It is below 1 where several replicas hold the same elements.
        """
        group = self.facts.get(name).replica_grouping
        return self.shard_groups[name].group_size / group.group_size

    def create_gradient_variables(self, row: int, prefix: str) -> addons.NamedTensors:
        """Create variables through which the host reads layer `row`'s gradients."""
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


def _variable_name(stored_name: str, quantized: Mapping[str, DequantSpec]) -> str:
    """Name of the variable that a stored tensor (such as its quantized codes) represents."""
    variable, _, _ = stored_name.rpartition(".")
    return variable if variable in quantized else stored_name


def label_buffers(buffers: NamedRemoteBuffers, kind: str) -> None:
    """Label remote buffers with the kind of state in them, for plans and disk offload."""
    for buffer in buffers.to_dict().values():
        buffer.kind = kind


def _shard_groups(facts: NamedVariableFactories) -> dict[str, popxl.ReplicaGrouping]:
    """Replica groups over which variables can be sharded: replicas that hold equal values.

    Where those have no constant stride, they are runs of consecutive replicas, as in PopXL.
    """
    return {n: group.const_rg for n, group in facts.replica_groupings.to_dict().items()}


def _build_load_and_gather_graphs(
    buffers: NamedRemoteBuffers, groupings: Mapping[str, popxl.ReplicaGrouping]
) -> tuple[addons.GraphWithNamedArgs, list[str], addons.GraphWithNamedArgs]:
    """Build the graphs that load a layer's shards and all-gather them to full variables."""
    load, names = addons.load_remote_graph(buffers)
    shards = addons.NamedTensors.pack(names, load.graph.outputs)
    gather, _ = all_gather_replica_sharded_graph(
        shards, replica_groups=NamedReplicaGrouping.from_dict(groupings)
    )
    return load, names, gather


def _create_gradient_buffer(
    buffer: popxl.RemoteBuffer, num_layers: int, dtype: popxl.dtype
) -> popxl.RemoteBuffer:
    spec = popxl.TensorSpec(buffer.tensor_shape, dtype, buffer.meta_shape)
    return create_remote_buffer(spec, num_layers, shard_over=1)
