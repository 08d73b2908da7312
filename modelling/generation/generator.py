"""What a family provides to generate: one description, which both executors run.

The resident executor has all weights on the device and the values of one micro-batch; the streamed
one lets all micro-batches pass through a layer at a time, whose values are in remote buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from modelling.generation.search import SpecialTokens
from modelling.layers import LayerModules, LMHeadLoss
from popxl import Tensor, TensorSpec
from popxl_addons import Module

NUM_KV_TENSORS = 2
"""The last tensors of a layer's caches, which each position changes. The others, such as keys and
values of an encoder's output, stay as they are."""

MicroBatchTensor = Any
"""A tensor of one micro-batch, as an executor has it: a `Tensor`, or the `LayerIO` that has it."""

Caches = Any
"""What the layers of a stack keep between positions, as an executor has it."""

LayerInputs = Sequence[Tensor | list[Tensor]]
"""Inputs of a layer; lists of tensors are inputs one after the other."""

LayerInputsFn = Callable[..., LayerInputs]
"""Further inputs of the layers of a type: (type index, prompt state, loop invariants) -> inputs."""


def no_layer_inputs(kind: int, *given: Tensor) -> LayerInputs:
    """Layers take nothing else."""
    return []


class Executor(Protocol):
    """Runs a model's parts, by the names of their layers in the weight map."""

    def run(
        self,
        name: str,
        module: Module,
        x: MicroBatchTensor,
        prompt_state: Sequence[MicroBatchTensor] = (),
        loop_invariants: Sequence[Tensor] = (),
    ) -> MicroBatchTensor:
        """A part that is there once; `build(x, *about, *same)` returns one tensor."""
        ...

    def run_layers(
        self,
        name: str,
        layers: LayerModules,
        x: MicroBatchTensor,
        caches: Caches | None = None,
        prompt_state: Sequence[MicroBatchTensor] = (),
        loop_invariants: Sequence[Tensor] = (),
        layer_inputs: LayerInputsFn = no_layer_inputs,
    ) -> tuple[MicroBatchTensor, Caches]:
        """All layers of a stack.

        Args:
            layers: `build(x, *shared)` or `build(x, caches, *shared)` returns x, and keys and
                values.
            about: see `PreparedPrompts`.
            same: for all micro-batches.
            shared: of a kind of layer, `prompt_state` and `loop_invariants`.
        """
        ...

    def init_caches(self, name: str, layers: LayerModules, x: MicroBatchTensor) -> Caches:
        """The caches of a stack before the first position; `build(x)` returns those of a layer."""
        ...

    def run_with_first_layer(self, name: str, path: str, module: Module, *args: Any) -> Tensor:
        """A module whose variables are those of a stack's first layer, under `path`."""
        ...


class PreparedPrompts(NamedTuple):
    """What follows from a micro-batch's prompts alone.

    Attributes:
        prompted: bool (prompts,), false for those to leave out, which only fill up the batch.
        first: int32 (sequences, 1), the tokens read at the first position.
        read: see `Search.start`.
        about: what prefill and all positions need to know of them.
    """

    has_prompt: Tensor
    first_tokens: Tensor
    prompt_tokens: Tensor
    prompt_state: list[Tensor]


class Generator(Protocol):
    """What a family provides, made in the Ir that it is to be used in.

    Attributes:
        prompt_length: tokens of a sample, padded.
        prompts_per_sample: most prompts that share a sample.
        sequences: decoded in a micro-batch.
        output_length: tokens generated for each prompt.
        special: tokens with a meaning.
        about: specs of `Prompts.prompt_state`.
    """

    prompt_length: int
    prompts_per_sample: int
    sequences: int
    output_length: int
    special_tokens: SpecialTokens
    prompt_state: Sequence[TensorSpec]

    def prepare_prompts(self, input_ids: Tensor, mask: Tensor) -> PreparedPrompts:
        """What the prompts say, in the current graph.

        Args:
            input_ids: int32 (batch, prompt_length).
            mask: int32, for each token the number of its prompt in the sample, from 1, and 0 for
                padding; prompts without a token are not generated for.
        """
        ...

    def prefill(
        self,
        executor: Executor,
        input_ids: MicroBatchTensor,
        prompt_state: Sequence[MicroBatchTensor],
    ) -> tuple[Caches, list[Tensor]]:
        """Read the prompts: the caches, and what is the same for all micro-batches."""
        ...

    def decode(
        self,
        executor: Executor,
        input_ids: MicroBatchTensor,
        position: Tensor,
        caches: Caches,
        prompt_state: Sequence[MicroBatchTensor],
        loop_invariants: Sequence[Tensor],
    ) -> tuple[MicroBatchTensor, Caches]:
        """Read a token of each sequence: the last layer's output, (sequences, 1, hidden), and the
        caches.

        Args:
            input_ids: int32 (sequences, 1).
            position: int32 scalar, from 0.
            same: see `prefill`.
        """
        ...

    def head(self) -> LMHeadLoss:
        """The module at the end of the model."""
        ...


GeneratorFactory = Callable[[Any, int], Generator]
"""Makes the generator of a configuration, whose `model.eval` must be set, in the current Ir, for so
many sequences of a prompt."""
