"""Generation with T5: encode once, then decode with key/value caches.

What does not change from one position to the next is computed before the loop: the encoder's
output, its keys and values for each decoder layer, and the relative positions' biases. In the loop
a decoder layer computes one query, key and value.

The modules' attributes have the names of the weight table's layers, and so have their variables.
"""

from __future__ import annotations

from collections.abc import Sequence

import popxl
from config.t5 import T5Config
from modelling.generation import Inputs, SpecialTokens, Stack, Start, Step, bind_step, put
from modelling.generation.condition import call_if, is_any
from modelling.generation.stack import joined
from modelling.layers import Axes, Embeddings, Groups, Layer
from modelling.t5.attention import CrossAttention
from modelling.t5.blocks import DecoderBlock, EncoderBlock
from modelling.t5.ends import DecoderHead, EncoderFinalNorm
from modelling.t5.packing import Packing
from modelling.t5.relative_position import RelativePosition
from popxl import Tensor, TensorSpec, ops
from popxl_addons import GraphWithNamedArgs, Module, NamedTensors
from popxl_addons.variable_factory import NamedVariableFactories

RELATIVE_POSITION = "self_attention.relative_position"


# ---- layers -------------------------------------------------------------------------------------
class EncodingBlock(EncoderBlock):
    """An encoder layer that is given the biases, which are the same for all layers."""

    def build(self, x: Tensor, biases: Sequence[Tensor]) -> Tensor:  # type: ignore[override]
        """x: (batch, length, hidden) -> the same shape.

        Args:
            biases: of the scores, of relative positions and of padding.
        """
        attention = self.self_attention
        q, k, v = attention.project_qkv(x)
        x = attention.project_out(x, attention.attend(q, k, v, biases))
        return self.feed_forward(x)


class DecodingBlock(DecoderBlock):
    """A decoder layer at one position.

    Args:
        sequences: decoded for each prompt.
    """

    def __init__(self, config: T5Config, sequences: int) -> None:
        super().__init__(config)
        self.packing = Packing.of(config, sequences)

    def build(  # type: ignore[override]
        self,
        x: Tensor,
        own: Sequence[Tensor],
        position: Tensor,
        encoded: Sequence[Tensor],
        position_bias: Tensor,
        hiding: Tensor,
    ) -> tuple[Tensor, ...]:
        """x: (sequences, 1, hidden) -> the same shape, and `own` with the new key and value.

        Args:
            own: keys and values of the positions before, (sequences, heads, positions, d_kv) each.
            position: int32 scalar.
            encoded: keys and values of the encoder's output.
            position_bias: float32 (1, heads, 1, positions); it also hides later positions.
            hiding: see `Packing.cross_bias`.
        """
        attention, cross = self.self_attention, self.cross_attention
        query, *new = attention.project_qkv(x)
        keys, values = put(own, position, new)
        x = attention.project_out(x, attention.attend(query, keys, values, [position_bias]))
        encoded_keys, encoded_values = encoded
        x = self.packing.together(x)
        heads = cross.attend(cross.project_q(x), encoded_keys, encoded_values, [hiding])
        x = self.packing.apart(cross.project_out(x, heads))
        return self.feed_forward(x), keys, values


class EncodedKeyValues(Layer):
    """The keys and values that a decoder layer's cross-attention takes from the encoder."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        groups = Groups.current(config.execution.tensor_parallel)
        self.cross_attention = CrossAttention(config, groups)

    def build(self, encoded: Tensor) -> tuple[Tensor, ...]:
        """encoded: (batch, length, hidden) -> two of (batch, heads, length, d_kv)."""
        return self.cross_attention.project_kv(encoded)


# ---- stacks -------------------------------------------------------------------------------------
class T5Stack(Stack):
    """A stack whose first layer also has the weight of relative positions."""

    def __init__(self, config: T5Config) -> None:
        super().__init__(config.model.layers)
        self.config = config

    def relative_positions(
        self, causal: bool, length: int
    ) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
        """The graph of the biases between `length` positions, and the first layer's variables."""
        config = self.config
        dtype = popxl.dtype.from_name(config.model.precision)
        groups = Groups.current(config.execution.tensor_parallel)
        layer = RelativePosition(config.model.attention, dtype, causal, groups)
        facts, graph = layer.create_graph(length, length)
        named = NamedVariableFactories()
        named.insert(RELATIVE_POSITION, facts)
        return named, graph


class EncoderStack(T5Stack):
    """All encoder layers."""

    def build(self, x: Tensor, hiding: Tensor) -> Tensor:
        """x: (batch, length, hidden) -> the same shape. `hiding`: see `Packing.encoder_bias`."""
        length = Axes.of(self.config).length(x)
        position_facts, positions = self.relative_positions(causal=False, length=length)
        (bias,) = positions.graph.outputs
        facts, block = EncodingBlock(self.config).create_graph(x, [bias.spec, hiding])
        biases: list[Tensor] = []
        for weights in self.weights_of_layers(facts, position_facts):
            if not biases:
                biases = [*positions.bind(weights.get(RELATIVE_POSITION)).call(), hiding]
            (x,) = block.bind(weights).call(x, biases)
        return x


class DecoderPreparation(T5Stack):
    """What the decoder layers need that is the same at all positions.

    Args:
        sequences: see `DecodingBlock`.
    """

    def __init__(self, config: T5Config, sequences: int) -> None:
        super().__init__(config)
        self.packing = Packing.of(config, sequences)

    def build(self, encoded: Tensor, mask: Tensor, wanted: Tensor) -> list[Tensor]:
        """What hides tokens of the encoder, position biases, each layer's keys and values.

        Args:
            encoded: (batch, length, hidden).
            mask: see `Packing`.
            wanted: bool scalar; without it keys and values are zeros. See `call_if`: XLA would keep
                those of all layers in two layouts at once.

        Returns:
            `Packing.cross_bias` of one query; biases of positions, float32 (1, heads, positions,
            positions), for each query and key; keys and values, (batch, heads, length, d_kv).
        """
        length = self.config.model.decoder_sequence_length
        position_facts, positions = self.relative_positions(causal=True, length=length)
        facts, project = EncodedKeyValues(self.config).create_graph(encoded)
        prepared = [self.packing.cross_bias(mask, length=1)]
        for weights in self.weights_of_layers(facts, position_facts):
            if len(prepared) == 1:
                prepared += positions.bind(weights.get(RELATIVE_POSITION)).call()
            prepared += call_if(wanted, project.bind(weights), encoded)
        return prepared


class DecoderStack(T5Stack):
    """All decoder layers at one position. `sequences`: see `DecodingBlock`."""

    def __init__(self, config: T5Config, sequences: int) -> None:
        super().__init__(config)
        self.sequences = sequences

    def build(
        self,
        x: Tensor,
        position: Tensor,
        caches: Sequence[Tensor],
        prepared: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """x: (prompts, 1, hidden) -> the same shape, and the new caches.

        Args:
            caches: each layer's keys and values of the positions before.
            prepared: what `DecoderPreparation` returns.
        """
        hiding, biases, *encoded = prepared
        bias = ops.dynamic_slice(biases, position, [2], [1], no_overlap=True)

        def others(pair: slice) -> Inputs:
            return position, encoded[pair], bias, hiding

        return self.at_one_position(DecodingBlock(self.config, self.sequences), x, caches, others)


# ---- the model ----------------------------------------------------------------------------------
class Encode(Module):
    """From prompts to what the decoder needs of them. `sequences`: see `DecodingBlock`."""

    def __init__(self, config: T5Config, sequences: int) -> None:
        super().__init__()
        self.packing = Packing.of(config)
        self.embeddings = Embeddings(config)
        self.encoder = EncoderStack(config)
        self.encoder_head = EncoderFinalNorm(config)
        self.decoder = DecoderPreparation(config, sequences)

    def build(self, words: Tensor, mask: Tensor, wanted: Tensor) -> list[Tensor]:
        """words, int32 (batch, length) -> what `DecoderPreparation` returns; mask: `Packing`'s."""
        with popxl.plan.part("embeddings/prompt"):
            x = self.embeddings(words)
        with popxl.plan.part("encoder/prompt"):
            x = self.encoder(x, self.packing.encoder_bias(mask))
        with popxl.plan.part("encoder_head/prompt"):
            x = self.encoder_head(x)
        with popxl.plan.part("decoder/prompt"):
            return self.decoder(x, mask, wanted)


class T5Step(Step):
    """See `Step`."""

    def __init__(self, config: T5Config, sequences: int) -> None:
        super().__init__(config, DecoderHead(config))
        self.decoder = DecoderStack(config, sequences)

    def through(
        self, x: Tensor, position: Tensor, caches: Sequence[Tensor], fixed: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """See `Step`. Fixed is what `DecoderPreparation` returns."""
        with popxl.plan.part("decoder/token"):
            return self.decoder(x, position, caches, fixed)


class T5Generator:
    """See `modelling.generation.Generator`."""

    def __init__(self, config: T5Config, groups: Groups, sequences: int = 1) -> None:
        """Create the graphs in the current Ir. `config.model.eval` must be set."""
        model, batch = config.model, config.execution.micro_batch_size
        self.special = SpecialTokens.of(model)
        self.prompt_length = model.sequence_length
        self.prompts_per_sample = config.data.examples_per_row
        self.output_length = model.decoder_sequence_length
        self._packing = Packing.of(config)
        self._sequences = batch * self.prompts_per_sample * sequences
        self._groups, self._layers = groups, model.layers
        words = TensorSpec((batch, self.prompt_length), popxl.int32)
        wanted = TensorSpec((), popxl.bool)
        encode_facts, self._encode = Encode(config, sequences).create_graph(words, words, wanted)
        prepared = [t.spec for t in self._encode.graph.outputs]
        _, heads, _, d_kv = prepared[-1].shape
        self._cache = TensorSpec(
            (self._sequences, heads, self.output_length, d_kv), prepared[-1].dtype
        )
        step_facts, self._step = T5Step(config, sequences).create_graph(
            TensorSpec((), popxl.int32),
            TensorSpec((self._sequences, 1), popxl.int32),
            [self._cache] * (2 * self._layers),
            prepared,
        )
        self.facts = joined(encode_facts, step_facts)  # both have the embeddings

    def begin(self, weights: NamedTensors, words: Tensor, mask: Tensor) -> Start:
        """See `modelling.generation.Generator`."""
        prompted = self._packing.is_there(mask)
        prepared = self._encode.bind(weights).call(words, mask, is_any(prompted, self._groups))
        cache = ops.init(self._cache.shape, self._cache.dtype, "cache")
        caches = [cache] * (2 * self._layers)
        step = bind_step(self._step, weights, len(caches), prepared)
        starts = [[self.special.pad]] * self._sequences  # T5 starts with its padding token
        first = popxl.constant(starts, popxl.int32, "start_tokens")
        read = popxl.constant([[self.special.pad]] * prompted.nelms, popxl.int32, "read")
        return Start(step, caches, first, prompted, read)
