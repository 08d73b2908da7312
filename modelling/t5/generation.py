"""Generation with T5: encode once, then decode with key/value caches.

What does not change from one position to the next is computed before the first: the encoder's
output, its keys and values for each decoder layer, and the relative positions' biases. A decoder
layer then computes one query, key and value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import popxl
from config.t5 import T5Config
from modelling.adapters import LayerAdapters
from modelling.generation import Caches, Executor, LayerInputs, Prompts, SpecialTokens, Value, put
from modelling.generation.wrapped import Wrapped
from modelling.layers import Embeddings, Groups, Layer, Layers
from modelling.t5.biases import Packing, RelativePosition
from modelling.t5.blocks import (
    CrossAttention,
    DecoderBlock,
    DecoderHead,
    EncoderBlock,
    EncoderFinalNorm,
)
from modelling.t5.weights import decoder_layer, encoder_layer, weight_table
from popxl import Tensor, TensorSpec, ops


# ---- layers -------------------------------------------------------------------------------------
class EncodingBlock(Wrapped):
    """An encoder layer that is given the biases, which are the same for all layers."""

    layer: EncoderBlock

    def build(self, x: Tensor, biases: Sequence[Tensor]) -> Tensor:
        """x: (batch, length, hidden) -> the same shape.

        Args:
            biases: of the scores, of relative positions and of padding.
        """
        attention = self.layer.self_attention
        q, k, v = attention.project_qkv(x)
        x = attention.project_out(x, attention.attend(q, k, v, biases))
        return self.layer.feed_forward(x)


class PreparedLayer(Layer):
    """The caches of a decoder layer before the first position.

    Args:
        cache: of its keys, or values, of all positions.
    """

    def __init__(self, config: T5Config, cache: TensorSpec) -> None:
        super().__init__()
        groups = Groups.current(config.execution.tensor_parallel)
        self.cross_attention = CrossAttention(config, groups)
        self.cache = cache

    def build(self, encoded: Tensor) -> tuple[Tensor, ...]:
        """encoded: (batch, length, hidden) -> the keys and values that cross-attention takes from
        the encoder, two of (batch, heads, length, d_kv); empty caches."""
        empty = [ops.init(self.cache.shape, self.cache.dtype) for _ in range(2)]
        return *self.cross_attention.project_kv(encoded), *empty


class DecodingBlock(Wrapped):
    """A decoder layer at one position."""

    layer: DecoderBlock

    def __init__(self, layer: DecoderBlock, packing: Packing) -> None:
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
        """x: (sequences, 1, hidden) -> the same shape, and the caches with the new key and value.

        Args:
            caches: what `PreparedLayer` gives, with keys and values of the positions before,
                (sequences, heads, positions, d_kv) each.
            position: int32 scalar.
            position_bias: float32 (1, heads, 1, positions); it also hides later positions.
            hiding: see `Packing.cross_bias`.
        """
        attention, cross = self.layer.self_attention, self.layer.cross_attention
        encoded_keys, encoded_values, *own = caches
        query, *new = attention.project_qkv(x)
        keys, values = put(own, position, new)
        x = attention.project_out(x, attention.attend(query, keys, values, [position_bias]))
        x = self._packing.together(x)
        heads = cross.attend(cross.project_q(x), encoded_keys, encoded_values, [hiding])
        x = self._packing.apart(cross.project_out(x, heads))
        return self.layer.feed_forward(x), keys, values


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
        self._embeddings, self.head = self._adapters.ends(
            lambda: Embeddings(config), lambda: DecoderHead(config)
        )
        self._groups = Groups.current(config.execution.tensor_parallel)
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
        x = executor.run("embeddings", self._embeddings(), words)
        bias = self._positions(executor, "encoder", self.prompt_length)
        depth = config.model.layers
        layers = self._layers(encoder_layer, depth, EncoderBlock).wrapped(EncodingBlock)
        x, _ = executor.run_layers("encoder", layers, x, None, about, [bias], self._encoder_biases)
        encoded = executor.run("encoder_head", EncoderFinalNorm(config), x)
        attention = config.model.attention
        heads = self._groups.shard(attention.heads, "attention heads")
        shape = (self.sequences, heads, self.output_length, attention.d_kv)
        cache = TensorSpec(shape, self._dtype)
        depth = config.model.decoder_depth
        prepared = self._layers(decoder_layer, depth, lambda config: PreparedLayer(config, cache))
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
        x = executor.run("embeddings", self._embeddings(), words)
        bias = ops.dynamic_slice(same[0], position, [2], [1], no_overlap=True)
        depth = self._config.model.decoder_depth
        layers = self._layers(decoder_layer, depth, DecoderBlock).wrapped(
            lambda layer: DecodingBlock(layer, self._packing)
        )
        same = [position, bias]
        return executor.run_layers("decoder", layers, x, caches, about, same, self._decoder_inputs)

    def _layers(
        self, name: Callable[[int], str], depth: int, make: Callable[[T5Config], Layer]
    ) -> Layers:
        names = list(map(name, range(depth)))
        return self._adapters.layers(names, [0] * depth, lambda _: make(self._config))

    def _positions(self, executor: Executor, stack: str, length: int) -> Tensor:
        """The biases between `length` positions, whose weight the first layer has."""
        attention, causal = self._config.model.attention, stack == "decoder"
        module = RelativePosition(attention, self._dtype, causal, self._groups)
        path = "self_attention.relative_position"
        return executor.run_of_first(stack, path, module, length, length)

    def _encoder_biases(self, kind: int, mask: Tensor, bias: Tensor) -> LayerInputs:
        return [[bias, self._packing.encoder_bias(mask)]]

    def _decoder_inputs(
        self, kind: int, mask: Tensor, position: Tensor, bias: Tensor
    ) -> LayerInputs:
        return [position, bias, self._packing.cross_bias(mask, length=1)]
