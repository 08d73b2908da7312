"""Runs a generator's parts layer by layer, each for all micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import popxl
from modelling.generation.generator import NUM_KV_TENSORS, LayerInputsFn, no_layer_inputs
from modelling.generation.kv_cache import reorder_cache
from modelling.generation.layer_pass import LayerPass, ModelWeights
from modelling.layers import LayerModules
from modelling.layers.wrapped import LayerWrapper, rename_variables
from modelling.phases.buffers import LayerIO
from modelling.phases.settings import PhaseSettings
from popxl import Tensor
from popxl_addons import Module

Caches = list[list[LayerIO]]
"""The caches of the layers of each kind."""

ONCE = [(0, range(1))]
"""The run of a part that is there once."""


class WithLayerInputs(LayerWrapper):
    """A layer that makes for itself what layers share."""

    def __init__(self, layer: Module, layer_inputs: LayerInputsFn, has_caches: bool) -> None:
        super().__init__(layer)
        self._layer_inputs, self._has_caches = layer_inputs, has_caches

    def build(
        self, x: Tensor, caches: list[Tensor], beam_idx: list[Tensor], *given: Tensor
    ) -> tuple[Tensor, ...]:
        """What the layer returns.

        Args:
            parents: see `reorder_cache`.
            given: `Prompts.prompt_state`, then what is the same.
        """
        own = [*caches[:-NUM_KV_TENSORS], *reorder_cache(caches[-NUM_KV_TENSORS:], beam_idx)]
        first = [own] if self._has_caches else []
        outputs: tuple[Tensor, ...] = self.layer(x, *first, *self._layer_inputs(*given))
        return outputs


class StreamedExecutor:
    """An `Executor` that makes a pass of each part, and runs it at once.

    Args:
        moment: "prompt" or "token", for plans.
        parents: int32 (sequences,), see `SearchStep`; none where every sequence continues itself.
    """

    def __init__(
        self,
        weights: ModelWeights,
        settings: PhaseSettings,
        stage: str,
        beam_idx: Sequence[LayerIO] = (),
    ) -> None:
        self._weights, self._settings = weights, settings
        self._stage, self._parents = stage, beam_idx

    def run(
        self,
        name: str,
        module: Module,
        x: LayerIO,
        prompt_state: Sequence[LayerIO] = (),
        loop_invariants: Sequence[Tensor] = (),
    ) -> LayerIO:
        """See `Executor`."""
        specs = [t.spec for t in loop_invariants]
        layer_pass = LayerPass(
            module, [x, *prompt_state], self._settings, loop_invariants=specs, stores=[x]
        )
        with popxl.plan.part(f"{name}/{self._stage}"):
            self._weights.run(name, [layer_pass], ONCE, *loop_invariants)
        return layer_pass.outputs[0]

    def run_layers(
        self,
        name: str,
        layers: LayerModules,
        x: LayerIO,
        caches: Caches | None = None,
        prompt_state: Sequence[LayerIO] = (),
        loop_invariants: Sequence[Tensor] = (),
        layer_inputs: LayerInputsFn = no_layer_inputs,
    ) -> tuple[LayerIO, Caches]:
        """See `Executor`."""
        passes: list[LayerPass] = []
        new: Caches = []
        for kind, layer in enumerate(layers.modules):
            own = [] if caches is None else caches[kind]
            layer_pass = LayerPass(
                WithLayerInputs(layer, partial(layer_inputs, kind), caches is not None),
                [x, own, self._parents if own else [], *prompt_state],
                self._settings,
                loop_invariants=[t.spec for t in loop_invariants],
                stores=[x, *own[-NUM_KV_TENSORS:]],
                rows=layers.type_of_layer.count(kind),
            )
            passes.append(layer_pass)
            new.append([*own[:-NUM_KV_TENSORS], *layer_pass.outputs[1:]])
        with popxl.plan.part(f"{name}/{self._stage}"):
            self._weights.run(name, passes, layers.runs_of_one_type(), *loop_invariants)
        return x, new

    def init_caches(self, name: str, layers: LayerModules, x: LayerIO) -> Caches:
        """See `Executor`."""
        passes = [
            LayerPass(layer, [x], self._settings, rows=layers.type_of_layer.count(kind))
            for kind, layer in enumerate(layers.modules)
        ]
        with popxl.plan.part(f"{name}/{self._stage}"):
            self._weights.run(name, passes, layers.runs_of_one_type())
        return [layer_pass.outputs for layer_pass in passes]

    def run_with_first_layer(self, name: str, path: str, module: Module, *args: Any) -> Tensor:
        """See `Executor`."""
        made = module.create_graph(*args)
        facts, graph = rename_variables(*made, lambda variable: f"{path}.{variable}")
        phase = self._weights.first(name)
        phase.add(facts.inputs)
        with popxl.plan.part(f"{name}/{self._stage}"):
            weights = phase.load_full(graph.args.keys_flat(), popxl.constant(0, popxl.int32))
            return graph.bind(weights).call()[0]
