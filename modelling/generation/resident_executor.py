"""Generation with all weights on the device: a graph that prefills, and one for each position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import popxl
from modelling.decoder import EMBEDDINGS
from modelling.encoder_decoder import TOKENS
from modelling.generation.conditional_call import any_prompt, call_if
from modelling.generation.decode_loop import DecodeStart
from modelling.generation.generator import (
    NUM_KV_TENSORS,
    Generator,
    LayerInputs,
    LayerInputsFn,
    PreparedPrompts,
    no_layer_inputs,
)
from modelling.layers import LayerModules, LMHeadLoss, ParallelGroups
from modelling.layers.wrapped import unwrap
from popxl import Tensor, TensorSpec
from popxl_addons import BoundGraph, GraphWithNamedArgs, Module, NamedTensors
from popxl_addons.variable_factory import NamedVariableFactories

Item = TypeVar("Item")

Caches = list[list[Tensor]]
"""The caches of each layer."""


class ResidentExecutor:
    """An `Executor` that adds to the graph of a module, whose variables are all layers'.

    Args:
        moment: "prompt" or "token", for plans.
        wanted: bool scalar; caches that are filled are zeros unless it is set; None: it is.
    """

    def __init__(self, module: Module, stage: str, enabled: Tensor | None = None) -> None:
        self._module, self._stage, self._enabled = module, stage, enabled

    def run(
        self,
        name: str,
        module: Module,
        x: Tensor,
        prompt_state: Sequence[Tensor] = (),
        loop_invariants: Sequence[Tensor] = (),
    ) -> Tensor:
        """Implements `Executor`. A table of tokens has the names that it has in the embeddings."""
        own: Any = unwrap(module)
        setattr(self._module, name, own)
        if name != EMBEDDINGS and TOKENS in own.named_children():
            self._module.embeddings = own.move_out(TOKENS)
        with popxl.plan.part(f"{name}/{self._stage}"):
            y: Tensor = module(x, *prompt_state, *loop_invariants)
        return y

    def run_head(self, head: LMHeadLoss, x: Tensor) -> Tensor:
        """The logits of one position."""
        self._module.head = head
        with popxl.plan.part(f"head/{self._stage}"):
            table = self._module.get("embeddings").tokens.last_weights if head.tied else None
            return head.next_token_logits(x, table)

    def run_layers(
        self,
        name: str,
        layers: LayerModules,
        x: Tensor,
        caches: Caches | None = None,
        prompt_state: Sequence[Tensor] = (),
        loop_invariants: Sequence[Tensor] = (),
        layer_inputs: LayerInputsFn = no_layer_inputs,
    ) -> tuple[Tensor, Caches]:
        """See `Executor`. What layers share is computed once."""
        others = [
            layer_inputs(kind, *prompt_state, *loop_invariants)
            for kind in range(len(layers.modules))
        ]
        own: list[LayerInputs] = (
            [[]] * len(layers.type_of_layer) if caches is None else [[t] for t in caches]
        )
        new: Caches = []
        with popxl.plan.part(f"{name}/{self._stage}"):
            made = [
                module.create_graph(x, *first, *given)
                for module, first, given in zip(
                    layers.modules, layers.first_of_each_type(own), others, strict=True
                )
            ]
            for i, kind in enumerate(layers.type_of_layer):
                given = [t for t in (*own[i], *others[kind]) if not isinstance(t, list) or t]
                x, *changed = self._call(f"{name}.{i}", *made[kind], x, *given)
                new.append([*([] if caches is None else caches[i][:-NUM_KV_TENSORS]), *changed])
        return x, new

    def init_caches(self, name: str, layers: LayerModules, x: Tensor) -> Caches:
        """See `Executor`."""
        with popxl.plan.part(f"{name}/{self._stage}"):
            made = [module.create_graph(x) for module in layers.modules]
            return [
                list(self._call(f"{name}.{i}", *made[kind], x))
                for i, kind in enumerate(layers.type_of_layer)
            ]

    def run_with_first_layer(self, name: str, path: str, module: Module, *args: Any) -> Tensor:
        """See `Executor`."""
        facts, graph = module.create_graph(*args)
        with popxl.plan.part(f"{name}/{self._stage}"):
            return graph.bind(self._weights(f"{name}.0.{path}", facts)).call()[0]

    def _call(
        self, name: str, facts: NamedVariableFactories, graph: GraphWithNamedArgs, *given: Any
    ) -> tuple[Tensor, ...]:
        """Call a layer; one that fills caches, if they are wanted.

        Otherwise XLA puts off filling the caches until all layers are done, and keeps their
        projections until then, one and a half times the caches.
        """
        bound = graph.bind(self._weights(name, facts))
        if self._enabled is None or len(graph.graph.outputs) == 1:
            return bound.call(*given)
        return call_if(self._enabled, bound, *given)

    def _weights(self, prefix: str, facts: NamedVariableFactories) -> NamedTensors:
        """Inputs of the module for a layer's variables."""
        add = self._module.add_variable_factory
        inputs = {n: add(f, f"{prefix}.{n}") for n, f in facts.inputs.to_dict().items()}
        return NamedTensors.from_dict(inputs)


class _Prefill(Module):
    """From prompts to caches, and what is the same for all micro-batches."""

    def __init__(self, model: Generator) -> None:
        super().__init__()
        self._model = model

    def build(self, input_ids: Tensor, prompt_state: list[Tensor], enabled: Tensor) -> list[Tensor]:
        """input_ids: int32 (batch, length) -> the caches of each layer, then what is the same."""
        executor = ResidentExecutor(self, "prompt", enabled)
        self.caches, loop_invariants = self._model.prefill(executor, input_ids, prompt_state)
        return [*(t for layer in self.caches for t in layer), *loop_invariants]


class _Decode(Module):
    """From the token at one position to the logits of the next."""

    def __init__(self, model: Generator) -> None:
        super().__init__()
        self._model = model

    def build(
        self,
        position: Tensor,
        input_ids: Tensor,
        caches: Caches,
        fixed: Caches,
        prompt_state: list[Tensor],
        loop_invariants: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """input_ids: int32 (sequences, 1) -> float32 logits (sequences, part of the vocabulary),
        and the caches with this position.

        Args:
            position: of the words, int32 scalar.
            caches: of each layer, keys and values of the positions before.
            fixed: of each layer, the other caches.
        """
        executor = ResidentExecutor(self, "token")
        whole = [[*f, *c] for f, c in zip(fixed, caches, strict=True)]
        x, new = self._model.decode(
            executor, input_ids, position, whole, prompt_state, loop_invariants
        )
        logits = executor.run_head(self._model.head(), x)
        return logits, *(t for layer in new for t in layer[-NUM_KV_TENSORS:])


class PrefillResult(NamedTuple):
    """What a model has read.

    Attributes:
        caches: what a position changes of the caches, see `DecodeStart`.
        given: what else the graph of a position takes.
    """

    prompts: PreparedPrompts
    caches: list[Tensor]
    decode_inputs: list[Tensor]


class ResidentModel:
    """The graphs of a generator.

    Attributes:
        facts: the model's variables, under the names of its weight map's layers and paths.
    """

    def __init__(self, model: Generator, batch: int, groups: ParallelGroups) -> None:
        """Create the graphs in the current Ir. `batch`: samples of a micro-batch."""
        self._model, self._groups = model, groups
        input_ids = TensorSpec((batch, model.prompt_length), popxl.int32)
        prefill, enabled = _Prefill(model), TensorSpec((), popxl.bool)
        prefill_facts, self._prefill = prefill.create_graph(
            input_ids, list(model.prompt_state), enabled
        )
        self._counts = [len(layer) for layer in prefill.caches]
        outputs = [t.spec for t in self._prefill.graph.outputs]
        caches, loop_invariants = self._split(outputs)
        decode_facts, self._decode = _Decode(model).create_graph(
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

    def prefill(self, weights: NamedTensors, input_ids: Tensor, mask: Tensor) -> DecodeStart:
        """Read the prompts, in the current graph; arguments as for `read_prompts`."""
        prompts, caches, given = self.read_prompts(weights, input_ids, mask)
        decode = self.bound(weights, given)
        return DecodeStart(
            decode, caches, prompts.first_tokens, prompts.has_prompt, prompts.prompt_tokens
        )

    def read_prompts(self, weights: NamedTensors, input_ids: Tensor, mask: Tensor) -> PrefillResult:
        """Read the prompts, in the current graph.

        Args:
            weights: values of the variables, by the names of `facts`.
            input_ids, mask: see `Generator.read_prompts`.
        """
        prompts = self._model.prepare_prompts(input_ids, mask)
        enabled = any_prompt(prompts.has_prompt, self._groups)
        outputs = self._prefill.bind(weights).call(input_ids, *prompts.prompt_state, enabled)
        caches, loop_invariants = self._split(outputs)
        own = [t for layer in caches for t in layer[-NUM_KV_TENSORS:]]
        fixed = [t for layer in caches for t in layer[:-NUM_KV_TENSORS]]
        return PrefillResult(prompts, own, [*fixed, *prompts.prompt_state, *loop_invariants])

    def bound(self, weights: NamedTensors, given: Sequence[Tensor]) -> BoundGraph:
        """The graph of one position, for what is the same at all of them; see `PrefillResult`."""
        changing = sum(NUM_KV_TENSORS for _ in self._counts)
        rest = self._decode.graph.inputs[2 + changing :]  # after position, words and caches
        named = dict(zip(rest, given, strict=False))  # then come weights
        return self._decode.bind(weights).bind(named)

    def _split(self, outputs: Sequence[Item]) -> tuple[list[list[Item]], list[Item]]:
        """The caches of each layer, and what is the same, from the outputs of prefill."""
        left = list(outputs)
        caches = [[left.pop(0) for _ in range(count)] for count in self._counts]
        return caches, left
