"""Generation with decoder-only models: prefill the KV caches, then decode token by token.

The loop reads the last token of a prompt as its first one. So all positions do the same: read a
token, choose the next. Prefill needs no head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import popxl
from config.sections import RunConfig
from modelling.decoder import DecoderSpec
from modelling.generation.attention_contexts import CachedDecoderBlock, PrefillBlock
from modelling.generation.generator import (
    Caches,
    LayerExecutor,
    LayerInputs,
    MicroBatchTensor,
    PreparedPrompts,
)
from modelling.generation.kv_cache import KVCacheLayout
from modelling.generation.prompts import last_tokens, pad_left, repeat_interleave
from modelling.generation.search import SpecialTokenIds
from modelling.layers import Embeddings, LayerAdapters, LMHeadLoss, as_lm_head
from popxl import Tensor, TensorSpec

EMBEDDINGS, LAYER = "embeddings", "layer"


class DecoderOnlyGenerator:
    """Generates with a decoder-only model: prefill and decoding step through all its layers."""

    prompts_per_sample = 1

    def __init__(
        self, config: RunConfig, decoder: DecoderSpec, adapters: LayerAdapters, sequences: int
    ) -> None:
        """Build the generator of a decoder.

        Args:
            sequences: number of sequences decoded for each prompt.
        """
        model: Any = config.model  # decoder-only models have an output_length and tokens
        self._decoder, self._adapters, self._copies = decoder, adapters, sequences
        self._layers = adapters.build_layers(
            decoder.layer_names, decoder.layer_types, decoder.block
        )
        self.prompt_length, self.output_length = model.sequence_length, model.output_length
        self._layout = KVCacheLayout(self.prompt_length, self.output_length)
        self.special_tokens = SpecialTokenIds.from_model_config(model)
        batch = config.execution.micro_batch_size
        self.sequences = batch * sequences
        self.prompt_state: Sequence[TensorSpec] = [TensorSpec((batch,), popxl.int32)]

    def prepare_prompts(self, input_ids: Tensor, mask: Tensor) -> PreparedPrompts:
        """Find each prompt's last position, which decoding needs, and pad prompts on the left."""
        first, last_positions, is_real_prompt = last_tokens(input_ids, mask)
        first = repeat_interleave(first, self._copies)
        return PreparedPrompts(is_real_prompt, first, pad_left(input_ids, mask), [last_positions])

    def prefill(
        self,
        executor: LayerExecutor,
        input_ids: MicroBatchTensor,
        prompt_state: Sequence[MicroBatchTensor],
    ) -> tuple[Caches, list[Tensor]]:
        x = executor.run_layer(EMBEDDINGS, self._make_embeddings(), input_ids)
        layers = self._layers.map_modules(lambda b: PrefillBlock(b, self._layout, self._copies))
        _, caches = executor.run_layers(
            LAYER,
            layers,
            x,
            prompt_state=prompt_state,
            layer_inputs=lambda type_index, last_positions: [last_positions],
        )
        return caches, []

    def decode(
        self,
        executor: LayerExecutor,
        input_ids: MicroBatchTensor,
        position: Tensor,
        caches: Caches,
        prompt_state: Sequence[MicroBatchTensor],
        loop_invariants: Sequence[Tensor],
    ) -> tuple[MicroBatchTensor, Caches]:
        x = executor.run_layer(EMBEDDINGS, self._make_embeddings(), input_ids)
        layers = self._layers.map_modules(lambda b: CachedDecoderBlock(b, self._layout))
        return executor.run_layers(
            LAYER, layers, x, caches, prompt_state, [position], self._decode_block_inputs
        )

    def make_head(self) -> LMHeadLoss:
        return self._adapters.attach_to_head(as_lm_head(self._decoder.head()))

    def _make_embeddings(self) -> Embeddings:
        return self._adapters.attach_to_embeddings(self._decoder.embeddings())

    def _decode_block_inputs(
        self, layer_type: int, last_positions: Tensor, position: Tensor
    ) -> LayerInputs:
        """Inputs of a `CachedDecoderBlock` besides x and the KV caches."""
        return [repeat_interleave(last_positions, self._copies), position]
