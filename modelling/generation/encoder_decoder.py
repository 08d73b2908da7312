"""Generation with encoder-decoder models: encode once, then decode with KV caches.

Prefill computes everything that does not depend on the position: the encoder's output, its K and V
for each decoder layer, and position biases. A decoder layer then computes one query, key and value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

import popxl
from config.sections import RunConfig
from data.seq2seq import SEQ2SEQ
from modelling.encoder_decoder import (
    DECODER_EMBEDDINGS,
    ENCODER_HEAD,
    EncoderDecoderSpec,
    find_modules,
    layer_name,
)
from modelling.generation.generator import (
    Caches,
    LayerExecutor,
    LayerInputs,
    MicroBatchTensor,
    PreparedPrompts,
)
from modelling.generation.kv_cache import update_cache
from modelling.generation.search import SpecialTokenIds
from modelling.layers import (
    CrossAttention,
    LayerAdapters,
    LayerModules,
    LMHeadLoss,
    Module,
    RopeTables,
    as_lm_head,
    gather_rope_tables,
)
from modelling.layers.encoder_decoder import (
    DecoderContext,
    EncoderContext,
    PackedEncoderEmbeddings,
    PaddingMask,
    PositionBias,
    StackContext,
    with_packed_positions,
)
from modelling.layers.layer_wrapper import LayerWrapper
from modelling.layers.packing import Packing
from modelling.weights.weight_map import EMBEDDINGS
from popxl import Tensor, TensorSpec, ops


class DecoderTokenContext(DecoderContext):
    """Inputs besides x of an encoder-decoder's decoder block that processes one token per sequence.

    Args:
        caches: K and V of the encoder's output, then those of the earlier tokens, (sequences,
            heads, positions, head_dim) each.
        position: position of the token, int32 scalar.
        cross_bias: see `Packing.cross_attention_bias`.
        bias: position bias, float32 (1, heads, 1, positions), which also masks later positions;
            None if the blocks share none.

    Attributes:
        caches: K and V of the tokens, including the new one once the block is built.
    """

    def __init__(
        self,
        packing: Packing,
        caches: Sequence[Tensor],
        position: Tensor,
        cross_bias: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        StackContext.__init__(self, bias=bias)
        self.packing, self._position, self._cross_bias = packing, position, cross_bias
        keys, values, *token_caches = caches
        self._length = token_caches[0].shape[2]
        self._encoder_keys, self.caches = (keys, values), token_caches

    def qk_ids(self, window: int | None) -> Sequence[Tensor]:
        keys = np.arange(self._length)[None]
        query = self._position.reshape((1, 1))
        return [query, popxl.constant(keys, popxl.int32, "positions")]

    def position_bias(self, module: PositionBias, length: int) -> Tensor:
        if self._bias is not None:
            return self._bias
        return module.bias_of_query(self._position, self._length)

    def rope_tables(self, make_tables: Callable[[int], RopeTables], length: int) -> RopeTables:
        return gather_rope_tables(make_tables(self._length), self._position.reshape((1,)))

    def encoder_padding_mask(self, takes_lengths: bool, length: int) -> PaddingMask:
        return [self._cross_bias], None

    def encoder_kv(self, attention: CrossAttention) -> tuple[Tensor, Tensor]:
        return self._encoder_keys

    def update_cache(self, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        self.caches = update_cache(self.caches, self._position, [k, v])
        return self.caches[0], self.caches[1]


# ---- layers -------------------------------------------------------------------------------------
class DecoderTokenEmbeddings(LayerWrapper):
    """Decoder embeddings with learned positions, for one token at one position."""

    def build(self, input_ids: Tensor, position: Tensor) -> Tensor:
        """Embed one token at a position: int32 (sequences, 1), scalar -> (sequences, 1, hidden)."""
        x: Tensor = self.layer(input_ids, positions=position.reshape((1, 1)))
        return x


class EncoderBlockWithBias(LayerWrapper):
    """An encoder block; a position bias that all blocks share is one of its inputs."""

    def build(self, x: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """Run the block on prompts: (batch, length, hidden) -> same shape.

        Args:
            mask, bias: see `EncoderContext`.
        """
        y: Tensor = self.layer(x, EncoderContext(mask, bias=bias))
        return y


class CacheInitializer(LayerWrapper):
    """Module that creates a decoder block's KV caches: cross-attention's full, the others empty.

    Args:
        sequences, length: number and length of the generated sequences.
    """

    def __init__(self, layer: Module, sequences: int, length: int) -> None:
        super().__init__(layer)
        self._sequences, self._length = sequences, length

    def build(self, encoded: Tensor) -> tuple[Tensor, ...]:
        """Compute the caches from the encoder's output: K and V of cross-attention; two empty ones.

        K and V: (batch, heads, length, head_dim) each; empty caches: (sequences, heads, output
        length, head_dim) each.
        """
        (_, attention), *_ = find_modules(self.layer, CrossAttention)
        k, v = attention.project_kv(encoded)
        shape = (self._sequences, k.shape[1], self._length, k.shape[3])
        return k, v, *(ops.init(shape, k.dtype) for _ in range(2))


class DecodeBlock(LayerWrapper):
    """A decoder block that processes the token at one position and updates the KV caches."""

    def __init__(self, layer: Module, packing: Packing) -> None:
        super().__init__(layer)
        self._packing = packing

    def build(
        self,
        x: Tensor,
        caches: Sequence[Tensor],
        position: Tensor,
        cross_bias: Tensor,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Run the block on one token, x (sequences, 1, hidden) -> same shape; the updated caches.

        Other arguments as for `DecoderTokenContext`.
        """
        ctx = DecoderTokenContext(self._packing, caches, position, cross_bias, bias)
        return self.layer(x, ctx), *ctx.caches


# ---- the model ----------------------------------------------------------------------------------
class EncoderDecoderGenerator:
    """A `Generator` of encoder-decoder models: encode the prompt once, then decode."""

    def __init__(
        self, config: RunConfig, model: EncoderDecoderSpec, adapters: LayerAdapters, sequences: int
    ) -> None:
        """Build the generator of an encoder-decoder.

        Args:
            sequences: number of sequences decoded for each prompt.
        """
        batch = config.execution.micro_batch_size
        self._model, self._adapters = model, adapters
        self._packing = Packing.from_config(config, sequences)
        self.special_tokens = SpecialTokenIds.from_model_config(config.model)
        self.prompt_length = config.model.sequence_length
        self.output_length = SEQ2SEQ.output_length(config)
        self.prompts_per_sample = self._packing.examples_per_sample
        self.sequences = batch * self._packing.sequences_per_sample
        self.prompt_state: Sequence[TensorSpec] = [
            TensorSpec((batch, self.prompt_length), popxl.int32)
        ]

    def prepare_prompts(self, input_ids: Tensor, mask: Tensor) -> PreparedPrompts:
        """Prepare the prompts; the encoder's padding mask is their tensor for decoding."""
        start = [self.special_tokens.decoder_start_token_id]
        first = popxl.constant([start] * self.sequences, popxl.int32, "start_tokens")
        is_real_prompt = self._packing.real_example_mask(mask)
        prompt_tokens = popxl.constant([start] * is_real_prompt.nelms, popxl.int32, "prompt_tokens")
        return PreparedPrompts(is_real_prompt, first, prompt_tokens, [mask])

    def prefill(
        self,
        executor: LayerExecutor,
        input_ids: MicroBatchTensor,
        prompt_state: Sequence[MicroBatchTensor],
    ) -> tuple[Caches, list[Tensor]]:
        """Encode the prompts; returns initial KV caches and, if present, the position bias.

        The position bias is the loop invariant: it broadcasts to (1, heads, positions, positions),
        for each query and key.
        """
        start = with_packed_positions(self._adapters.attach_to_embeddings(self._model.embeddings()))
        x = executor.run_layer(
            EMBEDDINGS,
            start,
            input_ids,
            prompt_state if isinstance(start, PackedEncoderEmbeddings) else (),
        )
        bias = self._compute_position_bias(executor, "encoder", self.prompt_length)
        layers = self._make_blocks("encoder").map_modules(EncoderBlockWithBias)
        x, _ = executor.run_layers(
            "encoder", layers, x, None, prompt_state, bias, _encoder_block_inputs
        )
        if self._model.encoder_head is not None:
            x = executor.run_layer(ENCODER_HEAD, self._model.encoder_head(), x)
        sizes = self.sequences, self.output_length
        prepared = self._make_blocks("decoder").map_modules(lambda b: CacheInitializer(b, *sizes))
        caches = executor.init_caches("decoder", prepared, x)
        return caches, self._compute_position_bias(executor, "decoder", self.output_length)

    def decode(
        self,
        executor: LayerExecutor,
        input_ids: MicroBatchTensor,
        position: Tensor,
        caches: Caches,
        prompt_state: Sequence[MicroBatchTensor],
        loop_invariants: Sequence[Tensor],
    ) -> tuple[MicroBatchTensor, Caches]:
        decoder_embeddings = self._model.decoder_embeddings
        start = self._adapters.attach_to_embeddings(
            (decoder_embeddings or self._model.embeddings)(), self._model.token_embedding_layer
        )
        name = EMBEDDINGS if decoder_embeddings is None else DECODER_EMBEDDINGS
        if start.has_positions:
            x = executor.run_layer(
                name, DecoderTokenEmbeddings(start), input_ids, loop_invariants=[position]
            )
        else:
            x = executor.run_layer(name, start, input_ids)
        bias = [ops.dynamic_slice(t, position, [2], [1], no_overlap=True) for t in loop_invariants]
        layers = self._make_blocks("decoder").map_modules(lambda b: DecodeBlock(b, self._packing))
        loop_invariants = [position, *bias]
        return executor.run_layers(
            "decoder", layers, x, caches, prompt_state, loop_invariants, self._decoder_block_inputs
        )

    def make_head(self) -> LMHeadLoss:
        return self._adapters.attach_to_head(
            as_lm_head(self._model.head()), self._model.token_embedding_layer
        )

    def _make_blocks(self, stack_name: str) -> LayerModules:
        """Create a stack's blocks; a position bias is no variable of theirs but an input."""
        stack = self._model.stacks[stack_name]
        names = [layer_name(stack_name, i) for i in range(stack.num_layers)]
        return self._adapters.build_layers(names, stack.block_types_without_bias, stack.block)

    def _compute_position_bias(
        self, executor: LayerExecutor, stack: str, length: int
    ) -> list[Tensor]:
        """Position bias of `length` queries and keys, computed with the first layer's variables."""
        module = self._model.stacks[stack].find_position_bias()
        return (
            []
            if module is None
            else [executor.run_first_layer_submodule(stack, *module, length, length)]
        )

    def _decoder_block_inputs(
        self, layer_type: int, mask: Tensor, position: Tensor, *bias: Tensor
    ) -> LayerInputs:
        return [position, self._packing.cross_attention_bias(mask, length=1), *bias]


def _encoder_block_inputs(layer_type: int, *inputs: Tensor) -> LayerInputs:
    """Inputs of an encoder block besides x: padding mask and position bias."""
    return inputs
