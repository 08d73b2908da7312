"""Interfaces of generation: a model family's generator, and the executors that run its layers.

The resident executor has all weights on the device and the values of one micro-batch; the streamed
one runs all micro-batches through one layer at a time and keeps their values in remote buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from modelling.generation.search import DecodingStrategy, Search, SearchContext, SpecialTokenIds
from modelling.layers import LayerModules, LMHeadLoss, ParallelGroups
from popxl import Tensor, TensorSpec
from popxl_addons import Module

NUM_KV_TENSORS = 2
"""Number of tensors at the end of a layer's caches that each position updates: K and V. The others,
such as K and V of an encoder's output, do not change."""

MicroBatchTensor = Any
"""A tensor of one micro-batch in an executor's form: a `Tensor`, or the `LayerIO` that holds it."""

Caches = Any
"""The caches of a stack's layers in an executor's form."""

LayerInputs = Sequence[Tensor | list[Tensor]]
"""Inputs of a layer; the tensors of a list are separate inputs, in order."""

LayerInputsFn = Callable[..., LayerInputs]
"""Further inputs of the layers of a type: (type index, prompt state, loop invariants) -> inputs."""


def no_layer_inputs(layer_type: int, *tensors: Tensor) -> LayerInputs:
    """Return an empty list: a layer has no inputs besides x and the tensors of its prompt."""
    return []


class LayerExecutor(Protocol):
    """Interface: runs a model's layers, which it finds by their names in the weight map."""

    def run_layer(
        self,
        name: str,
        module: Module,
        x: MicroBatchTensor,
        prompt_state: Sequence[MicroBatchTensor] = (),
        loop_invariants: Sequence[Tensor] = (),
    ) -> MicroBatchTensor:
        """Run one layer: `build(x, *prompt_state, *loop_invariants)` returns one tensor."""
        ...

    def run_layers(
        self,
        stack: str,
        layers: LayerModules,
        x: MicroBatchTensor,
        caches: Caches | None = None,
        prompt_state: Sequence[MicroBatchTensor] = (),
        loop_invariants: Sequence[Tensor] = (),
        layer_inputs: LayerInputsFn = no_layer_inputs,
    ) -> tuple[MicroBatchTensor, Caches]:
        """Run all layers of a stack (encoder or decoder).

        Args:
            layers: `build(x, *inputs)` or `build(x, caches, *inputs)` returns x, K and V.
            prompt_state: see `PreparedPrompts`.
            loop_invariants: tensors that are equal for all micro-batches.
            layer_inputs: computes `inputs` of a layer type from the two above.

        Returns:
            The last layer's x, and the caches of all layers.
        """
        ...

    def init_caches(self, stack: str, layers: LayerModules, x: MicroBatchTensor) -> Caches:
        """Compute the initial KV caches of a stack; a layer's `build(x)` returns its own."""
        ...

    def run_first_layer_submodule(
        self, stack: str, path: str, module: Module, *args: Any
    ) -> Tensor:
        """Run the submodule at `path` of a stack's first layer, with that layer's variables."""
        ...


class PreparedPrompts(NamedTuple):
    """Tensors of a micro-batch that depend on its prompts only, computed once before decoding.

    Attributes:
        is_real_prompt: bool (prompts,), false for rows that only fill up the batch.
        first_tokens: int32 (sequences, 1), the tokens read at the first position.
        prompt_tokens: see `Search.init_state`.
        prompt_state: tensors that prefill and every position need.
    """

    is_real_prompt: Tensor
    first_tokens: Tensor
    prompt_tokens: Tensor
    prompt_state: list[Tensor]


class Generator(Protocol):
    """Interface of a model family: prefill and decoding step, created in the Ir that uses them.

    Attributes:
        prompt_length: tokens of a sample, padding included.
        prompts_per_sample: largest number of prompts that share a sample.
        sequences: sequences decoded in a micro-batch.
        output_length: tokens generated for each prompt.
        special_tokens: ids of the special tokens.
        prompt_state: specs of `PreparedPrompts.prompt_state`.
    """

    prompt_length: int
    prompts_per_sample: int
    sequences: int
    output_length: int
    special_tokens: SpecialTokenIds
    prompt_state: Sequence[TensorSpec]

    def prepare_prompts(self, input_ids: Tensor, mask: Tensor) -> PreparedPrompts:
        """Compute the per-prompt tensors (`PreparedPrompts`) in the current graph.

        Args:
            input_ids: int32 (batch, prompt_length).
            mask: int32, same shape: number of the token's prompt in the sample, from 1; 0 for
                padding. Prompts without tokens get no answer.
        """
        ...

    def prefill(
        self,
        executor: LayerExecutor,
        input_ids: MicroBatchTensor,
        prompt_state: Sequence[MicroBatchTensor],
    ) -> tuple[Caches, list[Tensor]]:
        """Process the prompts; returns KV caches and the constant inputs of the decoding loop."""
        ...

    def decode(
        self,
        executor: LayerExecutor,
        input_ids: MicroBatchTensor,
        position: Tensor,
        caches: Caches,
        prompt_state: Sequence[MicroBatchTensor],
        loop_invariants: Sequence[Tensor],
    ) -> tuple[MicroBatchTensor, Caches]:
        """Process one token of each sequence; returns its output and the updated KV caches.

        Args:
            input_ids: int32 (sequences, 1).
            position: int32 scalar, from 0.
            loop_invariants: see `prefill`.

        Returns:
            The last layer's output, (sequences, 1, hidden), and the updated caches.
        """
        ...

    def make_head(self) -> LMHeadLoss:
        """Create the LM head."""
        ...


def create_search(
    strategy: DecodingStrategy, generator: Generator, groups: ParallelGroups
) -> Search:
    """Create the search of a decoding strategy for a generator's tokens, in the current Ir."""
    tokens, length = generator.special_tokens, generator.output_length
    return strategy.create_search(SearchContext(groups, tokens, length, strategy.logits_processors))


GeneratorFactory = Callable[[Any, int], Generator]
"""Creates a generator in the current Ir: (config with `model.eval`, sequences per prompt)."""
