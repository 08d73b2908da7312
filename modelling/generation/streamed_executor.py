"""Executor that streams weights: each layer runs on all micro-batches before the next loads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import popxl
from modelling.generation.generator import NUM_KV_TENSORS, LayerInputsFn, no_layer_inputs
from modelling.generation.kv_cache import reorder_cache
from modelling.generation.layer_pass import LayerPass
from modelling.generation.streamed_weights import ModelWeights
from modelling.layers import LayerModules
from modelling.layers.layer_wrapper import LayerWrapper, rename_variables
from modelling.phases.buffers import LayerIO
from modelling.phases.settings import PhaseSettings
from popxl import Tensor
from popxl_addons import Module

Caches = list[list[LayerIO]]
"""The caches of each layer type."""

ONCE = [(0, range(1))]
"""The run of a single layer, see `Layers.runs`."""


class LayerWithSharedInputs(LayerWrapper):
    """Wraps a layer so that it computes itself the inputs that all layers of its type share."""

    def __init__(self, layer: Module, layer_inputs: LayerInputsFn, has_caches: bool) -> None:
        super().__init__(layer)
        self._layer_inputs, self._has_caches = layer_inputs, has_caches

    def build(
        self, x: Tensor, caches: list[Tensor], beam_idx: list[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Gather the caches by beam, compute the shared inputs and run the wrapped layer.

        Args:
            beam_idx: see `reorder_cache`.
            tensors: the prompt state, then the loop invariants.
        """
        reordered = [*caches[:-NUM_KV_TENSORS], *reorder_cache(caches[-NUM_KV_TENSORS:], beam_idx)]
        cache_input = [reordered] if self._has_caches else []
        outputs: tuple[Tensor, ...] = self.layer(x, *cache_input, *self._layer_inputs(*tensors))
        return outputs


class StreamedExecutor:
    """A `LayerExecutor` that streams weights: runs each layer on all micro-batches, then the next.

    Args:
        stage: "prompt" or "token", the label in plans.
        beam_idx: int32 (sequences,), see `SearchStepResult`; empty: every sequence keeps its
            caches.
    """

    def __init__(
        self,
        weights: ModelWeights,
        settings: PhaseSettings,
        stage: str,
        beam_idx: Sequence[LayerIO] = (),
    ) -> None:
        self._weights, self._settings = weights, settings
        self._stage, self._beam_idx = stage, beam_idx

    def run_layer(
        self,
        name: str,
        module: Module,
        x: LayerIO,
        prompt_state: Sequence[LayerIO] = (),
        loop_invariants: Sequence[Tensor] = (),
    ) -> LayerIO:
        specs = [t.spec for t in loop_invariants]
        layer_pass = LayerPass(
            module, [x, *prompt_state], self._settings, loop_invariants=specs, stores=[x]
        )
        with popxl.plan.part(f"{name}/{self._stage}"):
            self._weights.run_stack(name, [layer_pass], ONCE, *loop_invariants)
        return layer_pass.outputs[0]

    def run_layers(
        self,
        stack: str,
        layers: LayerModules,
        x: LayerIO,
        caches: Caches | None = None,
        prompt_state: Sequence[LayerIO] = (),
        loop_invariants: Sequence[Tensor] = (),
        layer_inputs: LayerInputsFn = no_layer_inputs,
    ) -> tuple[LayerIO, Caches]:
        passes: list[LayerPass] = []
        new: Caches = []
        for type_index, layer in enumerate(layers.modules):
            layer_caches = [] if caches is None else caches[type_index]
            layer_pass = LayerPass(
                LayerWithSharedInputs(layer, partial(layer_inputs, type_index), caches is not None),
                [x, layer_caches, self._beam_idx if layer_caches else [], *prompt_state],
                self._settings,
                loop_invariants=[t.spec for t in loop_invariants],
                stores=[x, *layer_caches[-NUM_KV_TENSORS:]],
                rows=layers.type_of_layer.count(type_index),
            )
            passes.append(layer_pass)
            new.append([*layer_caches[:-NUM_KV_TENSORS], *layer_pass.outputs[1:]])
        with popxl.plan.part(f"{stack}/{self._stage}"):
            self._weights.run_stack(stack, passes, layers.runs_of_one_type(), *loop_invariants)
        return x, new

    def init_caches(self, stack: str, layers: LayerModules, x: LayerIO) -> Caches:
        passes = [
            LayerPass(layer, [x], self._settings, rows=layers.type_of_layer.count(type_index))
            for type_index, layer in enumerate(layers.modules)
        ]
        with popxl.plan.part(f"{stack}/{self._stage}"):
            self._weights.run_stack(stack, passes, layers.runs_of_one_type())
        return [layer_pass.outputs for layer_pass in passes]

    def run_first_layer_submodule(
        self, stack: str, path: str, module: Module, *args: Any
    ) -> Tensor:
        facts, graph = rename_variables(
            *module.create_graph(*args), lambda variable: f"{path}.{variable}"
        )
        phase = self._weights.first_phase(stack)
        phase.add_variables(facts.inputs)
        with popxl.plan.part(f"{stack}/{self._stage}"):
            weights = phase.load_full(graph.args.keys_flat(), popxl.constant(0, popxl.int32))
            return graph.bind(weights).call()[0]
