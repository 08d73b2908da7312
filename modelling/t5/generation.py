"""Generation with T5: encode once, then decode with key/value caches.

What does not change from one position to the next is computed before the first: the encoder's
output, its keys and values for each decoder layer, and the relative positions' biases. A decoder
layer then computes one query, key and value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import popxl
from config.t5 import T5Config, T5Model
from modelling.generation import Caches, Executor, LayerInputs, Prompts, SpecialTokens, Value
from modelling.layers import LayerAdapters, Layers, LMHeadLoss, Module
from modelling.layers.wrapped import Wrapped
from modelling.t5.biases import Packing, RelativePosition
from modelling.t5.contexts import DecoderTokenContext, EncoderContext
from modelling.t5.model import (
    EncoderFinalNorm,
    T5DecoderBlock,
    T5EncoderBlock,
    embeddings,
    head,
)
from modelling.t5.table import decoder_layer, encoder_layer, weight_table
from popxl import Tensor, TensorSpec, ops


# ---- layers -------------------------------------------------------------------------------------
class EncodingBlock(Wrapped):
    """A block of the encoder that is given the biases, which are the same for all blocks."""

    layer: T5EncoderBlock

    def build(self, x: Tensor, mask: Tensor, position_bias: Tensor) -> Tensor:
        """x: (batch, length, hidden) -> the same shape.

        Args:
            mask, position_bias: see `EncoderContext`.
        """
        return self.layer(x, EncoderContext(mask, bias=position_bias))


class PreparedLayer(Wrapped):
    """The caches of a block of the decoder before the first position.

    Args:
        cache: of its keys, or values, of all positions.
    """

    layer: T5DecoderBlock

    def __init__(self, layer: Module, cache: TensorSpec) -> None:
        super().__init__(layer)
        self.cache = cache

    def build(self, encoded: Tensor) -> tuple[Tensor, ...]:
        """encoded: (batch, length, hidden) -> the keys and values that cross-attention takes from
        the encoder, two of (batch, heads, length, d_kv); empty caches."""
        attention = self.layer.layer[1].EncDecAttention
        empty = [ops.init(self.cache.shape, self.cache.dtype) for _ in range(2)]
        return *attention.project_kv(encoded), *empty


class DecodingBlock(Wrapped):
    """A block of the decoder at one position."""

    layer: T5DecoderBlock

    def __init__(self, layer: Module, packing: Packing) -> None:
        super().__init__(layer)
        self._packing = packing

    def build(
        self,
        x: Tensor,
        caches: Sequence[Tensor],
        position: Tensor,
        position_bias: Tensor,
        hiding: Tensor,
    ) -> tuple[Tensor, ...]:
        """x: (sequences, 1, hidden) -> the same shape, and the caches with the new key and value;
        arguments as for `DecoderTokenContext`."""
        ctx = DecoderTokenContext(self._packing, caches, position, position_bias, hiding)
        return self.layer(x, ctx), *ctx.caches


# ---- the model ----------------------------------------------------------------------------------
class T5Generator:
    """See `modelling.generation.Generator`."""

    def __init__(self, config: T5Config, sequences: int = 1) -> None:
        """
        Args:
            sequences: decoded for each prompt.
        """
        model, batch = config.model, config.execution.micro_batch_size
        self._config, self._adapters = config, LayerAdapters(config, weight_table)
        self._packing = Packing.of(config, sequences)
        self._dtype = popxl.dtype.from_name(model.precision)
        self.special = SpecialTokens.of(model)
        self.prompt_length, self.output_length = (
            model.sequence_length,
            model.decoder_sequence_length,
        )
        self.prompts_per_sample = config.data.examples_per_row
        self.sequences = batch * self.prompts_per_sample * sequences
        self.about: Sequence[TensorSpec] = [TensorSpec((batch, self.prompt_length), popxl.int32)]

    def begin(self, words: Tensor, mask: Tensor) -> Prompts:
        """See `Generator`; layers need to know the mask. T5 starts with its padding token."""
        first = popxl.constant([[self.special.pad]] * self.sequences, popxl.int32, "start_tokens")
        prompted = self._packing.is_there(mask)
        read = popxl.constant([[self.special.pad]] * prompted.nelms, popxl.int32, "read")
        return Prompts(prompted, first, read, [mask])

    def prefill(
        self, executor: Executor, words: Value, about: Sequence[Value]
    ) -> tuple[Caches, list[Tensor]]:
        """See `Generator`. The same are biases of positions, float32 (1, heads, positions,
        positions), for each query and key."""
        config = self._config
        x = executor.run("embeddings", self._adapters.embeddings(embeddings()), words)
        bias = self._positions(executor, "encoder", self.prompt_length)
        depth = config.model.layers
        layers = self._layers(encoder_layer, depth, T5EncoderBlock).wrapped(EncodingBlock)
        x, _ = executor.run_layers("encoder", layers, x, None, about, [bias], self._encoder_biases)
        encoded = executor.run("encoder_head", EncoderFinalNorm(config.model), x)
        attention = config.model.attention
        heads = attention.heads // config.execution.tensor_parallel
        shape = (self.sequences, heads, self.output_length, attention.d_kv)
        cache = TensorSpec(shape, self._dtype)
        depth = config.model.decoder_depth
        prepared = self._layers(decoder_layer, depth, T5DecoderBlock).wrapped(
            lambda layer: PreparedLayer(layer, cache)
        )
        caches = executor.prepare_layers("decoder", prepared, encoded)
        return caches, [self._positions(executor, "decoder", self.output_length)]

    def decode(
        self,
        executor: Executor,
        words: Value,
        position: Tensor,
        caches: Caches,
        about: Sequence[Value],
        same: Sequence[Tensor],
    ) -> tuple[Value, Caches]:
        """See `Generator`."""
        x = executor.run("embeddings", self._adapters.embeddings(embeddings()), words)
        bias = ops.dynamic_slice(same[0], position, [2], [1], no_overlap=True)
        depth = self._config.model.decoder_depth
        layers = self._layers(decoder_layer, depth, T5DecoderBlock).wrapped(
            lambda layer: DecodingBlock(layer, self._packing)
        )
        same = [position, bias]
        return executor.run_layers("decoder", layers, x, caches, about, same, self._decoder_inputs)

    def head(self) -> LMHeadLoss:
        """See `Generator`."""
        return self._adapters.head(head(self._config))

    def _layers(
        self, name: Callable[[int], str], depth: int, block: Callable[[T5Model, bool], Module]
    ) -> Layers:
        names = list(map(name, range(depth)))
        return self._adapters.layers(names, [0] * depth, lambda _: block(self._config.model, False))

    def _positions(self, executor: Executor, stack: str, length: int) -> Tensor:
        """The biases between `length` positions, whose weight the first layer has."""
        module = RelativePosition(causal=stack == "decoder")
        path = "layer.0.SelfAttention.relative_attention_bias"
        return executor.run_of_first(stack, path, module, length, length)

    def _encoder_biases(self, kind: int, mask: Tensor, bias: Tensor) -> LayerInputs:
        return [mask, bias]

    def _decoder_inputs(
        self, kind: int, mask: Tensor, position: Tensor, bias: Tensor
    ) -> LayerInputs:
        return [position, bias, self._packing.cross_bias(mask, length=1)]
