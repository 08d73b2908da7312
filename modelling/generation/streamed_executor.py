"""Runs a generator's parts layer by layer, each for all micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import popxl
from modelling.generation.caches import continued
from modelling.generation.generator import CACHES, Shared, nothing_shared
from modelling.generation.passes import ModelWeights, Pass
from modelling.generation.wrapped import Wrapped, renamed
from modelling.layers import Layers
from modelling.phases.buffers import Port
from modelling.phases.settings import Settings
from popxl import Tensor
from popxl_addons import Module

Kept = list[list[Port]]
"""What the layers of each kind keep."""

ONCE = [(0, range(1))]
"""The run of a part that is there once."""


class _Sharing(Wrapped):
    """A layer that makes for itself what layers share."""

    def __init__(self, layer: Module, shared: Shared, caches: bool) -> None:
        super().__init__(layer)
        self._shared, self._caches = shared, caches

    def build(
        self, x: Tensor, kept: list[Tensor], parents: list[Tensor], *given: Tensor
    ) -> tuple[Tensor, ...]:
        """Args:
        parents: see `continued`.
        given: facts, then what is the same.
        """
        own = [[*kept[:-CACHES], *continued(kept[-CACHES:], parents)]] if self._caches else []
        found: tuple[Tensor, ...] = self.layer(x, *own, *self._shared(*given))
        return found


class StreamedExecutor:
    """An `Executor` that makes a pass of each part, and runs it at once.

    Args:
        moment: "prompt" or "token", for plans.
        parents: int32 (sequences,), see `Advance`; none where every sequence continues itself.
    """

    def __init__(
        self, weights: ModelWeights, settings: Settings, moment: str, parents: Sequence[Port] = ()
    ) -> None:
        self._weights, self._settings = weights, settings
        self._moment, self._parents = moment, parents

    def run(self, name: str, module: Module, x: Port) -> Port:
        """See `Executor`."""
        visit = Pass(module, [x], self._settings, stores=[x])
        with popxl.plan.part(f"{name}/{self._moment}"):
            self._weights.run(name, [visit], ONCE)
        return visit.outputs[0]

    def run_layers(
        self,
        name: str,
        layers: Layers,
        x: Port,
        kept: Kept | None = None,
        facts: Sequence[Port] = (),
        same: Sequence[Tensor] = (),
        shared: Shared = nothing_shared,
    ) -> tuple[Port, Kept]:
        """See `Executor`."""
        passes: list[Pass] = []
        new: Kept = []
        for kind, layer in enumerate(layers.kinds):
            own = [] if kept is None else kept[kind]
            visit = Pass(
                _Sharing(layer, partial(shared, kind), kept is not None),
                [x, own, self._parents if own else [], *facts],
                self._settings,
                same=[t.spec for t in same],
                stores=[x, *own[-CACHES:]],
                rows=layers.order.count(kind),
            )
            passes.append(visit)
            new.append([*own[:-CACHES], *visit.outputs[1:]])
        with popxl.plan.part(f"{name}/{self._moment}"):
            self._weights.run(name, passes, layers.runs(), *same)
        return x, new

    def prepare_layers(self, name: str, layers: Layers, x: Port) -> Kept:
        """See `Executor`."""
        passes = [
            Pass(layer, [x], self._settings, rows=layers.order.count(kind))
            for kind, layer in enumerate(layers.kinds)
        ]
        with popxl.plan.part(f"{name}/{self._moment}"):
            self._weights.run(name, passes, layers.runs())
        return [visit.outputs for visit in passes]

    def run_of_first(self, name: str, path: str, module: Module, *args: Any) -> Tensor:
        """See `Executor`."""
        found = module.create_graph(*args)
        facts, graph = renamed(*found, lambda variable: f"{path}.{variable}")
        phase = self._weights.first(name)
        phase.add(facts.inputs)
        with popxl.plan.part(f"{name}/{self._moment}"):
            weights = phase.load_whole(graph.args.keys_flat(), popxl.constant(0, popxl.int32))
            return graph.bind(weights).call()[0]
