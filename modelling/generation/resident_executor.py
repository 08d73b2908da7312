"""Executor for weights that stay on the device: graphs of prefill and of one decoding step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import popxl
from modelling.encoder_decoder import TOKENS
from modelling.generation.conditional_call import any_across_replicas, call_graph_if
from modelling.generation.decode_loop import InitialDecodeState
from modelling.generation.generator import (
    NUM_KV_TENSORS,
    Generator,
    LayerInputs,
    LayerInputsFn,
    PreparedPrompts,
    no_layer_inputs,
)
from modelling.layers import LayerModules, LMHeadLoss, ParallelGroups, VocabularyEmbedding
from modelling.layers.layer_wrapper import unwrap_layer
from modelling.weights.weight_map import EMBEDDINGS
from popxl import Tensor, TensorSpec
from popxl_addons import BoundGraph, GraphWithNamedArgs, Module, NamedTensors
from popxl_addons.variable_factory import NamedVariableFactories

Item = TypeVar("Item")

Caches = list[list[Tensor]]
"""The caches of each layer."""


class ResidentExecutor:
    """A `LayerExecutor` that adds all layers to one module's graph, which owns their variables.

    Args:
        stage: "prompt" or "token", the label in plans.
        enabled: bool scalar; if false, prefill leaves zeros in the caches; None: always true.
    """

    _tokens: VocabularyEmbedding  # of the last embeddings that ran

    def __init__(self, module: Module, stage: str, enabled: Tensor | None = None) -> None:
        self._module, self._stage, self._enabled = module, stage, enabled

    def run_layer(
        self,
        name: str,
        module: Module,
        x: Tensor,
        prompt_state: Sequence[Tensor] = (),
        loop_invariants: Sequence[Tensor] = (),
    ) -> Tensor:
        """Run a layer by its name; `embeddings` means the token embedding that the encoder owns."""
        inner: Any = unwrap_layer(module)
        setattr(self._module, name, inner)
        if TOKENS in inner.named_children():
            self._tokens = inner.tokens
            if name != EMBEDDINGS and self._tokens.is_shared:
                self._module.embeddings = inner.extract_submodule(TOKENS)
        with popxl.plan.part(f"{name}/{self._stage}"):
            y: Tensor = module(x, *prompt_state, *loop_invariants)
        return y

    def run_head(self, head: LMHeadLoss, x: Tensor) -> Tensor:
        """Compute next-token logits: (sequences, 1, hidden) -> (sequences, local vocabulary)."""
        self._module.head = head
        with popxl.plan.part(f"head/{self._stage}"):
            table = self._tokens.last_weights if head.tied else None
            return head.next_token_logits(x, table)

    def run_layers(
        self,
        stack: str,
        layers: LayerModules,
        x: Tensor,
        caches: Caches | None = None,
        prompt_state: Sequence[Tensor] = (),
        loop_invariants: Sequence[Tensor] = (),
        layer_inputs: LayerInputsFn = no_layer_inputs,
    ) -> tuple[Tensor, Caches]:
        """Run all layers of a stack; inputs that layers share are computed once."""
        type_inputs = [
            layer_inputs(type_index, *prompt_state, *loop_invariants)
            for type_index in range(len(layers.modules))
        ]
        cache_inputs: list[LayerInputs] = (
            [[]] * len(layers.type_of_layer) if caches is None else [[t] for t in caches]
        )
        new: Caches = []
        with popxl.plan.part(f"{stack}/{self._stage}"):
            graphs = [
                module.create_graph(x, *first, *inputs)
                for module, first, inputs in zip(
                    layers.modules,
                    layers.first_of_each_type(cache_inputs),
                    type_inputs,
                    strict=True,
                )
            ]
            for i, type_index in enumerate(layers.type_of_layer):
                inputs = [
                    t
                    for t in (*cache_inputs[i], *type_inputs[type_index])
                    if not isinstance(t, list) or t
                ]
                x, *changed = self._call_layer(f"{stack}.{i}", *graphs[type_index], x, *inputs)
                new.append([*([] if caches is None else caches[i][:-NUM_KV_TENSORS]), *changed])
        return x, new

    def init_caches(self, stack: str, layers: LayerModules, x: Tensor) -> Caches:
        with popxl.plan.part(f"{stack}/{self._stage}"):
            graphs = [module.create_graph(x) for module in layers.modules]
            return [
                list(self._call_layer(f"{stack}.{i}", *graphs[type_index], x))
                for i, type_index in enumerate(layers.type_of_layer)
            ]

    def run_first_layer_submodule(
        self, stack: str, path: str, module: Module, *args: Any
    ) -> Tensor:
        facts, graph = module.create_graph(*args)
        with popxl.plan.part(f"{stack}/{self._stage}"):
            return graph.bind(self._add_layer_variables(f"{stack}.0.{path}", facts)).call()[0]

    def _call_layer(
        self, name: str, facts: NamedVariableFactories, graph: GraphWithNamedArgs, *inputs: Any
    ) -> tuple[Tensor, ...]:
        """Call a layer's graph; a layer that fills KV caches runs only if `enabled` is true.

        Without the condition XLA delays filling the caches until all layers are done, and keeps the
        projections until then, which take one and a half times the memory of the caches.
        """
        bound = graph.bind(self._add_layer_variables(name, facts))
        if self._enabled is None or len(graph.graph.outputs) == 1:
            return bound.call(*inputs)
        return call_graph_if(self._enabled, bound, *inputs)

    def _add_layer_variables(self, prefix: str, facts: NamedVariableFactories) -> NamedTensors:
        """Add a layer's variables to the module; returns them as arguments of its graph."""
        add = self._module.add_variable_factory
        inputs = {n: add(f, f"{prefix}.{n}") for n, f in facts.inputs.to_dict().items()}
        return NamedTensors.from_dict(inputs)


class _PrefillModule(Module):
    """Graph of prefill: from prompts to KV caches and loop invariants."""

    def __init__(self, model: Generator) -> None:
        super().__init__()
        self._model = model

    def build(self, input_ids: Tensor, prompt_state: list[Tensor], enabled: Tensor) -> list[Tensor]:
        """Run prefill: int32 (batch, length) -> KV caches of each layer, then loop invariants."""
        executor = ResidentExecutor(self, "prompt", enabled)
        self.caches, loop_invariants = self._model.prefill(executor, input_ids, prompt_state)
        return [*(t for layer in self.caches for t in layer), *loop_invariants]


class _DecodeModule(Module):
    """Graph of a decoding step: from the token at one position to the next token's logits."""

    def __init__(self, model: Generator) -> None:
        super().__init__()
        self._model = model

    def build(
        self,
        position: Tensor,
        input_ids: Tensor,
        caches: Caches,
        fixed_caches: Caches,
        prompt_state: list[Tensor],
        loop_invariants: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """Run the model on one token: int32 (sequences, 1) -> float32 logits; updated caches.

        Args:
            position: position of the tokens, int32 scalar.
            caches: K and V of the earlier positions, by layer.
            fixed_caches: caches that do not change, by layer.
        """
        executor = ResidentExecutor(self, "token")
        all_caches = [[*f, *c] for f, c in zip(fixed_caches, caches, strict=True)]
        x, new = self._model.decode(
            executor, input_ids, position, all_caches, prompt_state, loop_invariants
        )
        logits = executor.run_head(self._model.make_head(), x)
        return logits, *(t for layer in new for t in layer[-NUM_KV_TENSORS:])


class PrefillResult(NamedTuple):
    """Outputs of the prefill graph: prepared prompts, KV caches and constant inputs of decoding.

    Attributes:
        caches: the caches that decoding updates, see `InitialDecodeState`.
        decode_inputs: the other inputs of the decoding graph.
    """

    prompts: PreparedPrompts
    caches: list[Tensor]
    decode_inputs: list[Tensor]


class ResidentModel:
    """The prefill and the decoding graph of a model whose weights all stay on the device.

    Attributes:
        facts: factories of the model's variables, by layer and path of its weight map.
    """

    def __init__(self, model: Generator, batch: int, groups: ParallelGroups) -> None:
        """Create the graphs in the current Ir.

        Args:
            batch: samples of a micro-batch.
        """
        self._model, self._groups = model, groups
        input_ids = TensorSpec((batch, model.prompt_length), popxl.int32)
        prefill, enabled = _PrefillModule(model), TensorSpec((), popxl.bool)
        prefill_facts, self._prefill = prefill.create_graph(
            input_ids, list(model.prompt_state), enabled
        )
        self._counts = [len(layer) for layer in prefill.caches]
        outputs = [t.spec for t in self._prefill.graph.outputs]
        caches, loop_invariants = self._split_outputs(outputs)
        decode_facts, self._decode = _DecodeModule(model).create_graph(
            TensorSpec((), popxl.int32),
            TensorSpec((model.sequences, 1), popxl.int32),
            [layer[-NUM_KV_TENSORS:] for layer in caches],
            [layer[:-NUM_KV_TENSORS] for layer in caches],
            list(model.prompt_state),
            loop_invariants,
        )
        self.facts = NamedVariableFactories.from_dict(
            prefill_facts.to_dict() | decode_facts.to_dict()  # both have the embeddings
        )

    def prefill(self, weights: NamedTensors, input_ids: Tensor, mask: Tensor) -> InitialDecodeState:
        """Add prefill of the prompts to the current graph; arguments as for `run_prefill`."""
        prompts, caches, decode_inputs = self.run_prefill(weights, input_ids, mask)
        decode = self.bind_decode(weights, decode_inputs)
        return InitialDecodeState(
            decode, caches, prompts.first_tokens, prompts.is_real_prompt, prompts.prompt_tokens
        )

    def run_prefill(self, weights: NamedTensors, input_ids: Tensor, mask: Tensor) -> PrefillResult:
        """Prepare the prompts and add prefill to the current graph.

        Args:
            weights: values of the variables, by the names in `facts`.
            input_ids, mask: see `Generator.prepare_prompts`.
        """
        prompts = self._model.prepare_prompts(input_ids, mask)
        enabled = any_across_replicas(prompts.is_real_prompt, self._groups)
        outputs = self._prefill.bind(weights).call(input_ids, *prompts.prompt_state, enabled)
        caches, loop_invariants = self._split_outputs(outputs)
        kv = [t for layer in caches for t in layer[-NUM_KV_TENSORS:]]
        fixed = [t for layer in caches for t in layer[:-NUM_KV_TENSORS]]
        return PrefillResult(prompts, kv, [*fixed, *prompts.prompt_state, *loop_invariants])

    def bind_decode(self, weights: NamedTensors, decode_inputs: Sequence[Tensor]) -> BoundGraph:
        """Bind the weights and prefill's constant outputs to the decoding graph's inputs."""
        num_kv = NUM_KV_TENSORS * len(self._counts)
        constant = self._decode.graph.inputs[2 + num_kv :]  # after position, input_ids and caches
        named = dict(zip(constant, decode_inputs, strict=False))  # the weights are the last inputs
        return self._decode.bind(weights).bind(named)

    def _split_outputs(self, outputs: Sequence[Item]) -> tuple[list[list[Item]], list[Item]]:
        """Split prefill's outputs into KV caches by layer and loop invariants."""
        remaining = list(outputs)
        caches = [[remaining.pop(0) for _ in range(count)] for count in self._counts]
        return caches, remaining
