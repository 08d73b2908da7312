"""Generation layer by layer: the passes over micro-batches, and their weights.

As in training, a layer's weights are loaded from remote buffers once, and all micro-batches pass
through it. A micro-batch's state between layers and between positions (activations, key/value
caches, state of the search) is in remote buffers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

import popxl
from modelling.phases.buffers import LayerIO, loop_over_layers
from modelling.phases.phase_variables import PhaseVariables
from modelling.phases.settings import PhaseSettings
from modelling.quantisation import QUANT_FIELDS
from modelling.weights import WeightMapping
from modelling.weights.weight_map import without_expert_group
from popxl import Tensor, ops
from popxl_addons import Module, NamedTensors
from popxl_addons.transforms.batch_serialisation import (
    RemoteHandle,
    batch_serial_buffer,
    batch_serialise,
)
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory

LayerIOs = LayerIO | Sequence[LayerIO]
TOKENS = "tokens."
"""Begins the names of the embedding's variables, in its phase and in those that borrow them."""


def _shared_row_io(spec: popxl.TensorSpec, settings: PhaseSettings) -> LayerIO:
    """An entry for each micro-batch, whichever layer is at work."""
    buffer = popxl.remote_buffer(spec.shape, spec.dtype, settings.micro_batches)
    return LayerIO(spec, RemoteHandle(buffer, None))


def _per_layer_io(t: Tensor, settings: PhaseSettings, rows: int) -> LayerIO:
    """An entry for each layer and micro-batch."""
    return LayerIO(t.spec, RemoteHandle(batch_serial_buffer(t, settings.micro_batches, rows)))


class LayerPass:
    """A graph that all micro-batches pass through.

    Args:
        module: `build` takes the values of `loads`, then what is the same for all micro-batches.
        loads: where inputs of each micro-batch come from; lists are inputs that are lists.
        same: specs of the inputs that are the same for all of them.
        stores: where outputs go, in order, as far as there are such of their spec. The others get
            buffers of their own.
        rows: layers that it is called for; the new buffers have a row for each.

    Attributes:
        facts: the variables.
        outputs: where the outputs are.
    """

    def __init__(
        self,
        module: Module,
        loads: Sequence[LayerIOs],
        settings: PhaseSettings,
        loop_invariants: Sequence[popxl.TensorSpec] = (),
        stores: Sequence[LayerIO] = (),
        rows: int = 1,
    ) -> None:
        listed = [[p] if isinstance(p, LayerIO) else list(p) for p in loads]
        specs = [p.spec if isinstance(p, LayerIO) else [port.spec for port in p] for p in loads]
        facts, graph = module.create_graph(*specs, *loop_invariants)
        self.facts, self.names = facts.inputs, graph.args.keys_flat()
        inner, flat = graph.graph, [port for ports in listed for port in ports]
        pairs = zip(inner.outputs, stores, strict=False)
        self.outputs = [port for t, port in pairs if t.spec == port.spec]
        self.outputs += [
            _shared_row_io(t.spec, settings) if rows == 1 else _per_layer_io(t, settings, rows)
            for t in inner.outputs[len(self.outputs) :]
        ]
        assert len(set(inner.outputs)) == len(inner.outputs), "an output has one place"
        loaded = zip(inner.inputs, flat, strict=False)
        stored = zip(inner.outputs, self.outputs, strict=True)
        self._serialised = batch_serialise(
            graph,
            settings.micro_batches,
            load_handles={t: port.value for t, port in loaded},
            store_streams={},
            store_buffers={t: port.handle for t, port in stored},
            rows=rows,
            io_mode="compute",
        ).graph

    def call(self, row: Tensor, weights: NamedTensors, *loop_invariants: Tensor) -> None:
        """Let all micro-batches pass, through layer `row`."""
        self._serialised.bind(weights).call(row, *loop_invariants)


class PhaseWeights:
    """The weights of a phase of training, for the passes that use them.

    Their buffers are as in training, so that a session may lend its entries.

    Args:
        name: of the phase.
        entries: number of its layers.
        lender: the phase that owns the table of tokens, if it is another.

    Attributes:
        experts: those of its layers' experts, where these are a phase in training.
    """

    def __init__(
        self,
        name: str,
        entries: int,
        settings: PhaseSettings,
        weight_source: PhaseWeights | None = None,
    ) -> None:
        self.name, self.entries = name, entries
        self._settings, self._weight_source = settings, weight_source
        self.experts: GroupWeights | None = None
        self._stores: list[PhaseVariables] = []
        self._loads: dict[tuple[str, ...], Callable[[Tensor], NamedTensors]] = {}

    def add(self, facts: NamedVariableFactories) -> None:
        """Make buffers for the variables of a graph, where there are none yet."""
        known = {n for store in self._stores for n in store.names}
        shared_names = () if self._weight_source is None else TOKENS
        new = {
            n: f
            for n, f in facts.to_dict().items()
            if n not in known and not n.startswith(shared_names)
        }
        if self.experts is not None:
            new = self.experts.add_group_variables(new)
        if new:
            named = NamedVariableFactories.from_dict(new)
            store = PhaseVariables.create(named, self.name, self.entries, self._settings)
            self._stores.append(store)

    @property
    def variables(self) -> list[NamedTensors]:
        """The variables of each layer, made now."""
        return [self._layer(row) for row in range(self.entries)]

    def _layer(self, row: int) -> NamedTensors:
        variables: dict[str, Tensor] = {}
        for store in self._stores:
            prefix = f"{self.name}.{row}"
            made = store.facts.init_remote(store.buffers, row, prefix, empty=True)
            variables |= made.to_dict()
        return NamedTensors(fwd=NamedTensors.from_dict(variables))

    def load_full(self, names: Sequence[str], row: Tensor) -> NamedTensors:
        """The weights of layer `row` that a graph names, gathered."""
        key = tuple(names)
        if key not in self._loads:
            self._loads[key] = self._build_loader(key)
        return self._loads[key](row)

    def _build_loader(self, names: Sequence[str]) -> Callable[[Tensor], NamedTensors]:
        own = [[n for n in names if n in store.names] for store in self._stores]
        stores = [store.subset(n) for store, n in zip(self._stores, own, strict=True) if n]
        shared_names = (
            [n for n in names if n.startswith(TOKENS)] if self._weight_source is not None else []
        )
        weight_source = self._weight_source if shared_names else None
        experts = self.experts

        def load(row: Tensor) -> NamedTensors:
            weights: dict[str, Tensor] = {}
            for store in stores:
                weights |= store.load_dequantized(row).to_dict()
            if weight_source is not None:
                weights |= weight_source.load_full(
                    shared_names, popxl.constant(0, popxl.int32)
                ).to_dict()
            if experts is not None:
                weights |= experts.load_all_groups(names, row)
            return NamedTensors.from_dict(weights)

        return load

    def run(self, layer_pass: LayerPass, rows: range, first: int, *loop_invariants: Tensor) -> None:
        """Let all micro-batches pass through some layers.

        Args:
            rows: which ones.
            first: the number of the first of them among the layers that the pass is called for.
        """
        ahead = first - rows.start

        def body(row: Tensor, *loop_invariants: Tensor) -> list[Tensor]:
            at = row + ahead if ahead else row
            layer_pass.call(at, self.load_full(layer_pass.names, row), *loop_invariants)
            return []

        loop_over_layers(rows, body, (), loop_invariants)


class GroupWeights(PhaseWeights):
    """The weights of layers' groups of experts. What visits a layer has them all.

    Args:
        rows: of a group.
    """

    def __init__(
        self, name: str, entries: int, settings: PhaseSettings, rows: Sequence[WeightMapping]
    ) -> None:
        super().__init__(name, entries, settings)
        self._groups = settings.config.execution.expert_groups
        self._axes = {row.path: 0 for row in rows}  # along which groups follow each other
        self._axes |= {f"{row.path}.{p}": 1 - row.input_axis for row in rows for p in QUANT_FIELDS}

    def add_group_variables(
        self, facts: Mapping[str, VariableFactory]
    ) -> dict[str, VariableFactory]:
        """Make buffers for what is a group's of a layer's variables, and give the others."""
        own = {n: self._group_factory(n, f) for n, f in facts.items() if n in self._axes}
        self.add(NamedVariableFactories.from_dict(own))
        return {n: f for n, f in facts.items() if n not in own}

    def _group_factory(self, name: str, whole: VariableFactory) -> VariableFactory:
        shape = list(whole.shape_on_replica)
        shape[self._axes[name]] //= self._groups
        zeros = np.broadcast_to(np.zeros((), whole.dtype.as_numpy()), shape)
        return VariableFactory(zeros, whole.dtype, replica_grouping=whole.replica_grouping)

    def load_all_groups(self, names: Sequence[str], row: Tensor) -> dict[str, Tensor]:
        """The weights of all groups of layer `row` that a graph names, joined."""
        own = [name for name in names if name in self._axes]
        if not own:
            return {}
        first = row * self._groups
        parts = [self.load_full(own, first + g) for g in range(self._groups)]
        return {n: ops.concat([part.get(n) for part in parts], self._axes[n]) for n in own}


class ModelWeights:
    """The weights of all phases, by the layers that they are of.

    Args:
        phases: the weight map's.
    """

    def __init__(self, phases: Mapping[str, Sequence[str]], settings: PhaseSettings) -> None:
        self._phases: dict[str, list[PhaseWeights]] = {}
        self._first: dict[str, PhaseWeights] = {}  # by its first layer
        for phase, layers in phases.items():
            if layers and without_expert_group(layers[0]) != layers[0]:
                self._add_experts(phase, layers, settings)
            elif layers:
                stack = layers[0].split(".")[0]
                weight_source = next(iter(self._phases.get("embeddings", ())), None)
                weights = PhaseWeights(phase, len(layers), settings, weight_source)
                self._phases.setdefault(stack, []).append(weights)
                self._first[layers[0]] = weights

    def _add_experts(self, phase: str, layers: Sequence[str], settings: PhaseSettings) -> None:
        """Let the layers of a phase have their groups of experts."""
        assert settings.weight_map is not None
        of, rows = (
            self._first[without_expert_group(layers[0])],
            settings.weight_map.layers[layers[0]],
        )
        of.experts = GroupWeights(phase, len(layers), settings, rows)

    @property
    def variables(self) -> dict[str, list[NamedTensors]]:
        """By phase and layer, as `modelling.weights.Variables` has them; made now."""
        every = [p for phases in self._phases.values() for p in phases]
        every += [p.experts for p in every if p.experts is not None]
        return {p.name: p.variables for p in every}

    def first(self, name: str) -> PhaseWeights:
        """The phase of a stack's first layer."""
        return self._phases[name][0]

    def layers(self, name: str) -> int:
        """How many layers a stack has."""
        return sum(phase.entries for phase in self._phases[name])

    def run(
        self,
        name: str,
        passes: Sequence[LayerPass],
        runs: Sequence[tuple[int, range]],
        *loop_invariants: Tensor,
    ) -> None:
        """Let all micro-batches pass through all layers of a stack, each by the pass of its kind.

        Args:
            runs: see `LayerModules.runs_of_one_type`.
        """
        done, before = [0] * len(passes), 0
        for phase in self._phases[name]:
            for kind, rows in runs:
                stop = min(rows.stop - before, phase.entries)
                part = range(max(rows.start - before, 0), stop)
                if part:
                    phase.add(passes[kind].facts)
                    phase.run(passes[kind], part, done[kind], *loop_invariants)
                    done[kind] += len(part)
            before += phase.entries
