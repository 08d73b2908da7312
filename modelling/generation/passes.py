"""Generation layer by layer: the passes over micro-batches, and their weights.

As in training, a layer's weights are loaded from remote buffers once, and all micro-batches pass
through it. A micro-batch's state between layers and between positions (activations, key/value
caches, state of the search) is in remote buffers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import popxl
from modelling.generation.stack import joined
from modelling.phases.buffers import Port, over_layers
from modelling.phases.settings import Settings
from modelling.phases.state import VariableStore
from popxl import Tensor
from popxl_addons import GraphWithNamedArgs, Module, NamedTensors
from popxl_addons.transforms.batch_serialisation import (
    RemoteHandle,
    batch_serial_buffer,
    batch_serialise,
)
from popxl_addons.variable_factory import NamedVariableFactories

Ports = Port | Sequence[Port]
TABLE = "tokens.weight"
"""The embedding's table, in its phase and in that of a head that is tied to it."""


def one_row(spec: popxl.TensorSpec, settings: Settings) -> Port:
    """An entry for each micro-batch, whichever layer is at work."""
    buffer = popxl.remote_buffer(spec.shape, spec.dtype, settings.micro_batches)
    return Port(spec, RemoteHandle(buffer, None))


def _rows(t: Tensor, settings: Settings, rows: int) -> Port:
    """An entry for each layer and micro-batch."""
    return Port(t.spec, RemoteHandle(batch_serial_buffer(t, settings.micro_batches, rows)))


class Pass:
    """A graph that all micro-batches pass through.

    Args:
        module: `build` takes the values of `loads`, then what is the same for all micro-batches.
        loads: where inputs of each micro-batch come from; lists are inputs that are lists.
        same: specs of the inputs that are the same for all of them.
        stores: where outputs go, the first ones in order. The others get buffers of their own.
        rows: layers that it is called for; the new buffers have a row for each.
        part: name of the part of `module` whose variables these are; "": all.
        variables: the name that they have in their phase, in front of their own.

    Attributes:
        facts: the variables, by their phase's names.
        outputs: where the outputs are.
    """

    def __init__(
        self,
        module: Module,
        loads: Sequence[Ports],
        settings: Settings,
        same: Sequence[popxl.TensorSpec] = (),
        stores: Sequence[Port] = (),
        rows: int = 1,
        part: str = "",
        variables: str = "",
    ) -> None:
        listed = [[p] if isinstance(p, Port) else list(p) for p in loads]
        specs = [p.spec if isinstance(p, Port) else [port.spec for port in p] for p in loads]
        facts, graph = module.create_graph(*specs, *same)
        self.facts, graph = named_within(facts.inputs, graph, part, variables)
        self.names = graph.args.keys_flat()
        inner, flat = graph.graph, [port for ports in listed for port in ports]
        self.outputs = [
            *stores,
            *(
                one_row(t.spec, settings) if rows == 1 else _rows(t, settings, rows)
                for t in inner.outputs[len(stores) :]
            ),
        ]
        assert len(set(inner.outputs)) == len(inner.outputs), "an output has one place"
        loaded = zip(inner.inputs, flat, strict=False)
        stored = zip(inner.outputs, self.outputs, strict=True)
        self._serialised = batch_serialise(
            graph,
            settings.micro_batches,
            load_handles={t: port.value for t, port in loaded},
            store_streams={},
            store_buffers={t: port.value for t, port in stored},
            rows=rows,
            io_mode="compute",
        ).graph

    def call(self, row: Tensor, weights: NamedTensors, *same: Tensor) -> None:
        """Let all micro-batches pass, through layer `row`."""
        self._serialised.bind(weights).call(row, *same)


def named_within(
    facts: NamedVariableFactories, graph: GraphWithNamedArgs, part: str = "", variables: str = ""
) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
    """The variables of a part of a module, under the names of their phase. See `Pass`."""
    start, front = f"{part}." if part else "", f"{variables}." if variables else ""

    def renamed(name: str) -> str:
        return front + name.removeprefix(start)

    named = {renamed(n): f for n, f in facts.to_dict().items()}
    args = {renamed(n): t for n, t in graph.args.to_dict().items()}
    return (
        NamedVariableFactories.from_dict(named),
        GraphWithNamedArgs(graph.graph, NamedTensors.from_dict(args)),
    )


class PhaseWeights:
    """The weights of a phase of training, for the passes that use them.

    Their buffers are as in training, so that a session may lend its entries.

    Args:
        name: of the phase.
        entries: number of its layers.
        facts: variables that passes use; together, all of the phase's.
        borrowed: by name, the phase of one layer that owns a variable.
    """

    def __init__(
        self,
        name: str,
        facts: Sequence[NamedVariableFactories],
        settings: Settings,
        entries: int = 1,
        borrowed: Mapping[str, PhaseWeights] | None = None,
    ) -> None:
        self._owners = dict(borrowed or {})
        together = joined(*facts).to_dict()
        own = {n: f for n, f in together.items() if n not in self._owners}
        self.name, self.entries = name, entries
        self._store = VariableStore.create(NamedVariableFactories.from_dict(own), entries, settings)
        self.variables = [self._layer(row) for row in range(entries)]
        self._loads: dict[tuple[str, ...], Callable[[Tensor], NamedTensors]] = {}

    def _layer(self, row: int) -> NamedTensors:
        store = self._store
        fwd = store.facts.init_remote(store.buffers, row, f"{self.name}.{row}", empty=True)
        return NamedTensors(fwd=fwd)

    def load_whole(self, names: Sequence[str], row: Tensor) -> NamedTensors:
        """Those that a graph names, of layer `row`, gathered."""
        key = tuple(names)
        if key not in self._loads:
            self._loads[key] = self._loading(key)
        return self._loads[key](row)

    def _loading(self, names: Sequence[str]) -> Callable[[Tensor], NamedTensors]:
        store = self._store.only([n for n in names if n not in self._owners])
        owners = {n: owner for n, owner in self._owners.items() if n in names}

        def load(row: Tensor) -> NamedTensors:
            found = store.load_whole(row).to_dict()
            for name, owner in owners.items():
                found |= owner.load_whole([name], popxl.constant(0, popxl.int32)).to_dict()
            return NamedTensors.from_dict(found)

        return load

    def run(self, visit: Pass, rows: range, first: int, *same: Tensor) -> None:
        """Let all micro-batches pass through some layers.

        Args:
            rows: which ones.
            first: the number of the first of them among the layers that the pass is called for.
        """
        ahead = first - rows.start

        def body(row: Tensor, *same: Tensor) -> list[Tensor]:
            at = row + ahead if ahead else row
            visit.call(at, self.load_whole(visit.names, row), *same)
            return []

        over_layers(rows, body, (), same)


class Stack:
    """The layers of phases that follow each other: one graph, with the weights of each layer."""

    def __init__(self, *phases: PhaseWeights | None) -> None:
        self.phases = [phase for phase in phases if phase is not None]

    @property
    def variables(self) -> dict[str, list[NamedTensors]]:
        """By phase and layer, as `modelling.weights.Variables` has them."""
        return {phase.name: phase.variables for phase in self.phases}

    def run(self, visit: Pass, *same: Tensor) -> None:
        """Let all micro-batches pass through all layers."""
        before = 0
        for phase in self.phases:
            phase.run(visit, range(phase.entries), before, *same)
            before += phase.entries


def head_stack(choose: Pass, embeddings: PhaseWeights, settings: Settings) -> Stack:
    """The stack of the head, which reads the embedding's table if it is tied to it."""
    tied = {TABLE: embeddings} if TABLE in choose.names else {}
    return Stack(PhaseWeights("head", [choose.facts], settings, borrowed=tied))
