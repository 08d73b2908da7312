"""Generation with T5 layer by layer: the encoder once, then the decoder for each position.

The modules are those of `modelling.t5.generation`; here each is a pass of its own over all
micro-batches. Of each decoder layer, the keys and values of the encoder's output are made before
the first position.
"""

from __future__ import annotations

from collections.abc import Sequence

import popxl
from config.t5 import T5Config
from modelling.generation import SpecialTokens
from modelling.generation.caches import continued
from modelling.generation.passes import Pass, PhaseWeights, Stack, head_stack, named_within
from modelling.generation.streamed import At, Begun
from modelling.layers import Embeddings, Groups
from modelling.phases.buffers import Port
from modelling.phases.settings import Settings
from modelling.t5.ends import DecoderHead, EncoderFinalNorm
from modelling.t5.generation import (
    RELATIVE_POSITION,
    DecodingBlock,
    EncodedKeyValues,
    EncodingBlock,
)
from modelling.t5.packing import Packing
from modelling.t5.relative_position import RelativePosition
from popxl import Tensor, TensorSpec, ops
from popxl_addons.variable_factory import NamedVariableFactories


# ---- layers -------------------------------------------------------------------------------------
class Encoding(EncodingBlock):
    """An encoder layer that hides what the prompts' masks say."""

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.packing = Packing.of(config)

    def build(self, x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        """x: (batch, length, hidden) -> the same shape.

        Args:
            mask: see `Packing`.
            bias: of relative positions.
        """
        return super().build(x, [bias, self.packing.encoder_bias(mask)])


class Preparing(EncodedKeyValues):
    """What a decoder layer needs before the first position.

    Args:
        cache: of its keys, or values, of all positions.
    """

    def __init__(self, config: T5Config, cache: TensorSpec) -> None:
        super().__init__(config)
        self.cache = cache

    def build(self, encoded: Tensor) -> tuple[Tensor, ...]:
        """encoded: (batch, length, hidden) -> its keys and values; empty caches."""
        empty = [ops.init(self.cache.shape, self.cache.dtype) for _ in range(2)]
        return *super().build(encoded), *empty


class Writing(DecodingBlock):
    """A decoder layer that reads one token of each sequence."""

    def build(  # type: ignore[override]
        self,
        x: Tensor,
        encoded: Sequence[Tensor],
        caches: Sequence[Tensor],
        parents: Sequence[Tensor],
        mask: Tensor,
        position: Tensor,
        bias: Tensor,
    ) -> tuple[Tensor, ...]:
        """x: (sequences, 1, hidden) -> the same shape, and the caches with this position.

        Args: see `DecodingBlock.build`, `continued` and `Packing`.
        """
        hiding = self.packing.cross_bias(mask, length=1)
        own = continued(caches, parents)
        return super().build(x, own, position, encoded, bias, hiding)


class _Positions:
    """The biases of relative positions of a stack, whose weight is in its first layer."""

    def __init__(self, config: T5Config, causal: bool, length: int, groups: Groups) -> None:
        dtype = popxl.dtype.from_name(config.model.precision)
        layer = RelativePosition(config.model.attention, dtype, causal, groups)
        facts, graph = layer.create_graph(length, length)
        self.facts, self._graph = named_within(facts, graph, variables=RELATIVE_POSITION)
        self.spec = graph.graph.outputs[0].spec

    def biases(self, first: PhaseWeights) -> Tensor:
        """float32 (1, heads, length, length)."""
        weights = first.load_whole(self.facts.keys_flat(), popxl.constant(0, popxl.int32))
        return self._graph.bind(weights).call()[0]


# ---- the model ----------------------------------------------------------------------------------
class T5Streams:
    """See `modelling.generation.streamed.StreamedGenerator`."""

    x: Port

    def __init__(self, settings: Settings, sequences: int) -> None:
        """
        Args:
            sequences: decoded for each prompt.
        """
        assert isinstance(settings.config, T5Config)
        self._settings, self._config, self._copies = settings, settings.config, sequences
        model = self._config.model
        self.special = SpecialTokens.of(model)
        self.prompt_length, self.output_length = (
            model.sequence_length,
            model.decoder_sequence_length,
        )
        self.prompts_per_sample = self._config.data.examples_per_row
        batch = self._config.execution.micro_batch_size
        self.sequences = batch * self.prompts_per_sample * sequences
        self._packing = Packing.of(self._config)
        self.stacks: list[Stack] = []

    def begin(self, words: Tensor, mask: Tensor) -> Begun:
        """See `StreamedGenerator`."""
        first = popxl.constant([[self.special.pad]] * self.sequences, popxl.int32, "start_tokens")
        prompted = self._packing.is_there(mask)
        read = popxl.constant([[self.special.pad]] * prompted.nelms, popxl.int32, "read")
        return Begun(prompted, first, read, [])

    # ---- passes ---------------------------------------------------------------------------------
    def connect(self, at: At) -> None:
        """See `StreamedGenerator`."""
        self._encoder_passes(at)
        self._decoder_passes(at)
        self._embeddings = Stack(PhaseWeights("embeddings", [self._prompts.facts], self._settings))
        encoder = [self._encode.facts]
        decoder = [self._prepare.facts, self._write.facts]
        self._encoder = self._stack("encoder", encoder, self._encoder_positions)
        self._decoder = self._stack("decoder", decoder, self._decoder_positions)
        self._encoder_head = Stack(
            PhaseWeights("encoder_head", [self._encoded.facts], self._settings)
        )
        self.stacks = [self._embeddings, self._encoder, self._encoder_head, self._decoder]

    def _encoder_passes(self, at: At) -> None:
        config, settings = self._config, self._settings
        self._prompts = Pass(Embeddings(config), [at.words], settings)
        (x,) = self._prompts.outputs
        self._encoder_positions = _Positions(config, False, self.prompt_length, settings.groups)
        bias = self._encoder_positions.spec
        self._encode = Pass(Encoding(config), [x, at.mask], settings, [bias], [x])
        self._encoded = Pass(EncoderFinalNorm(config), [x], settings, stores=[x])

    def _decoder_passes(self, at: At) -> None:
        config, settings, layers = self._config, self._settings, self._config.model.layers
        positions = self.output_length
        self._decoder_positions = _Positions(config, True, positions, settings.groups)
        attention, dtype = config.model.attention, settings.dtype
        heads = settings.groups.shard(attention.heads, "attention heads")
        cache = TensorSpec((self.sequences, heads, positions, attention.d_kv), dtype)
        (encoded,) = self._encoded.outputs
        self._prepare = Pass(Preparing(config, cache), [encoded], settings, rows=layers)
        key_values, caches = self._prepare.outputs[:2], self._prepare.outputs[2:]
        self._tokens = Pass(Embeddings(config), [at.next_words], settings)
        (self.x,) = self._tokens.outputs
        bias = TensorSpec((1, heads, 1, positions), popxl.float32)
        self._write = Pass(
            Writing(config, self._copies),
            [self.x, key_values, caches, at.parents, at.mask],
            settings,
            same=[TensorSpec((), popxl.int32), bias],
            stores=[self.x, *caches],
            rows=layers,
        )

    def _stack(
        self, name: str, facts: list[NamedVariableFactories], positions: _Positions
    ) -> Stack:
        settings, layers = self._settings, self._config.model.layers
        first = PhaseWeights(f"first_{name}_layer", [positions.facts, *facts], settings)
        others = PhaseWeights(f"{name}_block", facts, settings, layers - 1) if layers > 1 else None
        return Stack(first, others)

    def head(self) -> DecoderHead:
        """See `StreamedGenerator`."""
        return DecoderHead(self._config)

    def head_stack(self, choose: Pass) -> Stack:
        """See `StreamedGenerator`."""
        return head_stack(choose, self._embeddings.phases[0], self._settings)

    # ---- running --------------------------------------------------------------------------------
    def read(self) -> list[Tensor]:
        """See `StreamedGenerator`; gives the biases of the decoder's positions."""
        with popxl.plan.part("embeddings/prompt"):
            self._embeddings.run(self._prompts)
        with popxl.plan.part("encoder/prompt"):
            self._encoder.run(self._encode, self._encoder_positions.biases(self._encoder.phases[0]))
        with popxl.plan.part("encoder_head/prompt"):
            self._encoder_head.run(self._encoded)
        with popxl.plan.part("decoder/prompt"):
            self._decoder.run(self._prepare)
            return [self._decoder_positions.biases(self._decoder.phases[0])]

    def step(self, position: Tensor, same: Sequence[Tensor]) -> None:
        """See `StreamedGenerator`."""
        (biases,) = same
        with popxl.plan.part("embeddings/token"):
            self._embeddings.run(self._tokens)
        with popxl.plan.part("decoder/token"):
            bias = ops.dynamic_slice(biases, position, [2], [1], no_overlap=True)
            self._decoder.run(self._write, position, bias)
