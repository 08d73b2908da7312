"""Generation with an encoder-decoder: encode once, then decode with key/value caches.

What does not change from one position to the next is computed before the first: the encoder's
output, its keys and values for each decoder layer, and biases of positions. A decoder layer then
computes one query, key and value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import popxl
from config.sections import RunConfig
from data.seq2seq import SEQ2SEQ
from modelling.decoder import EMBEDDINGS
from modelling.encoder_decoder import (
    DECODER_EMBEDDINGS,
    ENCODER_HEAD,
    EncoderDecoderSpec,
    find_modules,
    layer_name,
)
from modelling.generation.generator import (
    Caches,
    Executor,
    LayerInputs,
    MicroBatchTensor,
    PreparedPrompts,
)
from modelling.generation.kv_cache import update_cache
from modelling.generation.search import SpecialTokens
from modelling.layers import CrossAttention, LayerAdapters, LayerModules, LMHeadLoss, Module
from modelling.layers.encoder_decoder import (
    DecoderContext,
    EncoderContext,
    PackedEncoderEmbeddings,
    PaddingMask,
    StackContext,
    with_packed_positions,
)
from modelling.layers.packing import Packing
from modelling.layers.wrapped import LayerWrapper
from popxl import Tensor, TensorSpec, ops


class DecoderTokenContext(DecoderContext):
    """The context of one token of each sequence.

    Args:
        caches: keys and values of the encoder's output, and those of the tokens before,
            (sequences, heads, positions, head_dim) each.
        position: of the token, int32 scalar.
        hiding: see `Packing.cross_bias`.
        bias: of positions, float32 (1, heads, 1, positions), which hides later ones too.

    Attributes:
        caches: of the tokens, with the new one once the block is built.
    """

    def __init__(
        self,
        packing: Packing,
        caches: Sequence[Tensor],
        position: Tensor,
        hiding: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        StackContext.__init__(self, bias=bias)
        self.packing, self._position, self._hiding = packing, position, hiding
        keys, values, *own = caches
        self._encoder_keys, self.caches = (keys, values), own

    def qk_ids(self, window: int | None) -> Sequence[Tensor]:
        if self._bias is not None:
            return []
        keys = np.arange(self.caches[0].shape[2])[None]
        at = self._position.reshape((1, 1))
        return [at, popxl.constant(keys, popxl.int32, "positions")]

    def encoder_padding_mask(self, takes_lengths: bool, length: int) -> PaddingMask:
        return [self._hiding], None

    def encoder_kv(self, attention: CrossAttention) -> tuple[Tensor, Tensor]:
        return self._encoder_keys

    def update_cache(self, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        self.caches = update_cache(self.caches, self._position, [k, v])
        return self.caches[0], self.caches[1]


# ---- layers -------------------------------------------------------------------------------------
class DecoderWord(LayerWrapper):
    """The beginning of a decoder that has learned positions, at one position."""

    def build(self, input_ids: Tensor, position: Tensor) -> Tensor:
        """input_ids: int32 (sequences, 1) -> (sequences, 1, hidden); `position`: int32 scalar."""
        x: Tensor = self.layer(input_ids, positions=position.reshape((1, 1)))
        return x


class EncodingBlock(LayerWrapper):
    """A block of the encoder that is given the biases, which are the same for all blocks."""

    def build(self, x: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> the same shape.

        Args:
            mask, bias: see `EncoderContext`.
        """
        y: Tensor = self.layer(x, EncoderContext(mask, bias=bias))
        return y


class PreparedLayer(LayerWrapper):
    """The caches of a block of the decoder before the first position.

    Args:
        sequences, length: of what is written.
    """

    def __init__(self, layer: Module, sequences: int, length: int) -> None:
        super().__init__(layer)
        self._sequences, self._length = sequences, length

    def build(self, encoded: Tensor) -> tuple[Tensor, ...]:
        """encoded: (batch, length, hidden) -> the keys and values that cross-attention takes from
        the encoder, two of (batch, heads, length, head_dim); empty caches."""
        (_, attention), *_ = find_modules(self.layer, CrossAttention)
        k, v = attention.project_kv(encoded)
        shape = (self._sequences, k.shape[1], self._length, k.shape[3])
        return k, v, *(ops.init(shape, k.dtype) for _ in range(2))


class DecodingBlock(LayerWrapper):
    """A block of the decoder at one position."""

    def __init__(self, layer: Module, packing: Packing) -> None:
        super().__init__(layer)
        self._packing = packing

    def build(
        self,
        x: Tensor,
        caches: Sequence[Tensor],
        position: Tensor,
        hiding: Tensor,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """x: (sequences, 1, hidden) -> the same shape, and the caches with the new key and value;
        arguments as for `DecoderTokenContext`."""
        ctx = DecoderTokenContext(self._packing, caches, position, hiding, bias)
        return self.layer(x, ctx), *ctx.caches


# ---- the model ----------------------------------------------------------------------------------
class EncoderDecoderGenerator:
    """An encoder-decoder as a `modelling.generation.Generator`."""

    def __init__(
        self, config: RunConfig, model: EncoderDecoderSpec, adapters: LayerAdapters, sequences: int
    ) -> None:
        """
        Args:
            sequences: decoded for each prompt.
        """
        batch = config.execution.micro_batch_size
        self._model, self._adapters = model, adapters
        self._packing = Packing.from_config(config, sequences)
        self.special_tokens = SpecialTokens.from_model(config.model)
        self.prompt_length = config.model.sequence_length
        self.output_length = SEQ2SEQ.output_length(config)
        self.prompts_per_sample = self._packing.examples_per_sample
        self.sequences = batch * self._packing.sequences_per_sample
        self.prompt_state: Sequence[TensorSpec] = [
            TensorSpec((batch, self.prompt_length), popxl.int32)
        ]

    def prepare_prompts(self, input_ids: Tensor, mask: Tensor) -> PreparedPrompts:
        """Prompts as `Generator.prepare_prompts` makes them; layers also need the mask."""
        start = [self.special_tokens.decoder_start_token_id]
        first = popxl.constant([start] * self.sequences, popxl.int32, "start_tokens")
        has_prompt = self._packing.has_tokens(mask)
        read = popxl.constant([start] * has_prompt.nelms, popxl.int32, "read")
        return PreparedPrompts(has_prompt, first, read, [mask])

    def prefill(
        self,
        executor: Executor,
        input_ids: MicroBatchTensor,
        prompt_state: Sequence[MicroBatchTensor],
    ) -> tuple[Caches, list[Tensor]]:
        """Implements `Generator`. The same are biases of positions, if any, which broadcast to
        (1, heads, positions, positions), for each query and key."""
        start = with_packed_positions(self._adapters.attach_to_embeddings(self._model.embeddings()))
        x = executor.run(
            EMBEDDINGS,
            start,
            input_ids,
            prompt_state if isinstance(start, PackedEncoderEmbeddings) else (),
        )
        bias = self._position_bias(executor, "encoder", self.prompt_length)
        layers = self._layers("encoder").map_modules(EncodingBlock)
        x, _ = executor.run_layers("encoder", layers, x, None, prompt_state, bias, _encoder_inputs)
        if self._model.encoder_head is not None:
            x = executor.run(ENCODER_HEAD, self._model.encoder_head(), x)
        sizes = self.sequences, self.output_length
        prepared = self._layers("decoder").map_modules(lambda b: PreparedLayer(b, *sizes))
        caches = executor.init_caches("decoder", prepared, x)
        return caches, self._position_bias(executor, "decoder", self.output_length)

    def decode(
        self,
        executor: Executor,
        input_ids: MicroBatchTensor,
        position: Tensor,
        caches: Caches,
        prompt_state: Sequence[MicroBatchTensor],
        loop_invariants: Sequence[Tensor],
    ) -> tuple[MicroBatchTensor, Caches]:
        """Implements `Generator`."""
        own = self._model.decoder_embeddings
        start = self._adapters.attach_to_embeddings((own or self._model.embeddings)())
        name = EMBEDDINGS if own is None else DECODER_EMBEDDINGS
        if start.has_positions:
            x = executor.run(name, DecoderWord(start), input_ids, loop_invariants=[position])
        else:
            x = executor.run(name, start, input_ids)
        bias = [ops.dynamic_slice(t, position, [2], [1], no_overlap=True) for t in loop_invariants]
        layers = self._layers("decoder").map_modules(lambda b: DecodingBlock(b, self._packing))
        loop_invariants = [position, *bias]
        return executor.run_layers(
            "decoder", layers, x, caches, prompt_state, loop_invariants, self._decoder_inputs
        )

    def head(self) -> LMHeadLoss:
        """Implements `Generator`."""
        return self._adapters.attach_to_head(self._model.head())

    def _layers(self, name: str) -> LayerModules:
        """The blocks of a stack, none of which has biases of positions: they are given them."""
        stack = self._model.stacks[name]
        names = [layer_name(name, i) for i in range(stack.layers)]
        return self._adapters.build_layers(names, [False] * stack.layers, stack.block)

    def _position_bias(self, executor: Executor, stack: str, length: int) -> list[Tensor]:
        """The biases between `length` positions, whose variables the first layer has."""
        found = self._model.stacks[stack].position_bias()
        return (
            [] if found is None else [executor.run_with_first_layer(stack, *found, length, length)]
        )

    def _decoder_inputs(
        self, kind: int, mask: Tensor, position: Tensor, *bias: Tensor
    ) -> LayerInputs:
        return [position, self._packing.cross_bias(mask, length=1), *bias]


def _encoder_inputs(kind: int, *given: Tensor) -> LayerInputs:
    """The mask, and biases of positions."""
    return given
