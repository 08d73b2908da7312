"""Runs a generator's parts layer by layer, each for all micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import popxl
from modelling.generation.generator import KEYS_AND_VALUES, Shared, nothing_shared
from modelling.generation.kv_cache import continued
from modelling.generation.layer_pass import ModelWeights, Pass
from modelling.layers import Layers
from modelling.layers.wrapped import Wrapped, renamed
from modelling.phases.buffers import LayerIO
from modelling.phases.settings import PhaseSettings
from popxl import Tensor
from popxl_addons import Module

Caches = list[list[LayerIO]]
"""The caches of the layers of each kind."""

ONCE = [(0, range(1))]
"""The run of a part that is there once."""


class _Sharing(Wrapped):
    """A layer that makes for itself what layers share."""

    def __init__(self, layer: Module, shared: Shared, has_caches: bool) -> None:
        super().__init__(layer)
        self._shared, self._has_caches = shared, has_caches

    def build(
        self, x: Tensor, caches: list[Tensor], parents: list[Tensor], *given: Tensor
    ) -> tuple[Tensor, ...]:
        """What the layer returns.

        Args:
            parents: see `continued`.
            given: `Prompts.about`, then what is the same.
        """
        own = [*caches[:-KEYS_AND_VALUES], *continued(caches[-KEYS_AND_VALUES:], parents)]
        first = [own] if self._has_caches else []
        outputs: tuple[Tensor, ...] = self.layer(x, *first, *self._shared(*given))
        return outputs


class StreamedExecutor:
    """An `Executor` that makes a pass of each part, and runs it at once.

    Args:
        moment: "prompt" or "token", for plans.
        parents: int32 (sequences,), see `Advance`; none where every sequence continues itself.
    """

    def __init__(
        self,
        weights: ModelWeights,
        settings: PhaseSettings,
        moment: str,
        parents: Sequence[LayerIO] = (),
    ) -> None:
        self._weights, self._settings = weights, settings
        self._moment, self._parents = moment, parents

    def run(
        self,
        name: str,
        module: Module,
        x: LayerIO,
        about: Sequence[LayerIO] = (),
        same: Sequence[Tensor] = (),
    ) -> LayerIO:
        """See `Executor`."""
        specs = [t.spec for t in same]
        visit = Pass(module, [x, *about], self._settings, same=specs, stores=[x])
        with popxl.plan.part(f"{name}/{self._moment}"):
            self._weights.run(name, [visit], ONCE, *same)
        return visit.outputs[0]

    def run_layers(
        self,
        name: str,
        layers: Layers,
        x: LayerIO,
        caches: Caches | None = None,
        about: Sequence[LayerIO] = (),
        same: Sequence[Tensor] = (),
        shared: Shared = nothing_shared,
    ) -> tuple[LayerIO, Caches]:
        """See `Executor`."""
        passes: list[Pass] = []
        new: Caches = []
        for kind, layer in enumerate(layers.kinds):
            own = [] if caches is None else caches[kind]
            visit = Pass(
                _Sharing(layer, partial(shared, kind), caches is not None),
                [x, own, self._parents if own else [], *about],
                self._settings,
                same=[t.spec for t in same],
                stores=[x, *own[-KEYS_AND_VALUES:]],
                rows=layers.order.count(kind),
            )
            passes.append(visit)
            new.append([*own[:-KEYS_AND_VALUES], *visit.outputs[1:]])
        with popxl.plan.part(f"{name}/{self._moment}"):
            self._weights.run(name, passes, layers.runs(), *same)
        return x, new

    def prepare_layers(self, name: str, layers: Layers, x: LayerIO) -> Caches:
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
        made = module.create_graph(*args)
        facts, graph = renamed(*made, lambda variable: f"{path}.{variable}")
        phase = self._weights.first(name)
        phase.add(facts.inputs)
        with popxl.plan.part(f"{name}/{self._moment}"):
            weights = phase.load_whole(graph.args.keys_flat(), popxl.constant(0, popxl.int32))
            return graph.bind(weights).call()[0]
