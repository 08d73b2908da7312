"""Generation layer by layer: the passes over micro-batches, and their weights.

As in training, a layer's weights are loaded from remote buffers once, and all micro-batches pass
through it. A micro-batch's state between layers and between positions (activations, key/value
caches, state of the search) is in remote buffers of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def one_row(spec: popxl.TensorSpec, settings: Settings) -> Port:
    """An entry for each micro-batch, whichever layer is at work."""
    buffer = popxl.remote_buffer(spec.shape, spec.dtype, settings.steps)
    return Port(spec, RemoteHandle(buffer, None))


def _rows(t: Tensor, settings: Settings, rows: int) -> Port:
    """An entry for each layer and micro-batch."""
    return Port(t.spec, RemoteHandle(batch_serial_buffer(t, settings.steps, rows)))


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
            settings.steps,
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
    """

    def __init__(
        self,
        name: str,
        facts: Sequence[NamedVariableFactories],
        settings: Settings,
        entries: int = 1,
    ) -> None:
        together = joined(*facts)
        self.name, self.entries = name, entries
        self._store = VariableStore.create(together, entries, settings)
        self.variables = [self._layer(row) for row in range(entries)]

    def _layer(self, row: int) -> NamedTensors:
        store = self._store
        fwd = store.facts.init_remote(store.buffers, row, f"{self.name}.{row}", empty=True)
        return NamedTensors(fwd=fwd)

    def only(self, names: Sequence[str]) -> VariableStore:
        """The store of those that a graph names."""
        return self._store.only(names)


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
            store, start = phase.only(visit.names), before

            def body(row: Tensor, *same: Tensor, store: VariableStore = store, start: int = start):
                at = row + start if start else row
                visit.call(at, store.load_whole(row), *same)
                return []

            over_layers(range(phase.entries), body, (), same)
            before += phase.entries
