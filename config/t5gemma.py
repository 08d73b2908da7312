"""Configuration of T5Gemma (Zhang et al., arXiv:2504.06225) and T5Gemma 2's text part.

An encoder-decoder made of two Gemma decoders, with config.json's field names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Annotated, ClassVar, Literal

from config.base import ConfigSection
from config.errors import ConfigError, ContradictionError
from config.llama import FULL, SLIDING, LayerType, LlamaRope
from config.model import ModelSection
from config.sections import RunConfig
from config.task import Seq2SeqData
from config.values import (
    LayerCount,
    Names,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Probability,
    comma_separated_names,
    split_names,
)

T5GemmaType = Literal["t5gemma", "t5gemma2"]

STACKS = ("encoder", "decoder")


@dataclass(frozen=True)
class GemmaStack(ConfigSection):
    """The layers of an encoder or a decoder; the defaults are those of Gemma 2 2B."""

    hidden_size: PositiveInt = 2304
    """Features of a token between layers."""

    num_hidden_layers: LayerCount = 26
    """Number of layers."""

    intermediate_size: PositiveInt = 9216
    """Features inside a feed-forward layer."""

    num_attention_heads: PositiveInt = 8
    """Number of attention heads."""

    num_key_value_heads: PositiveInt = 4
    """Key and value heads, each shared by equally many query heads."""

    head_dim: PositiveInt = 256
    """Features of a head."""

    query_pre_attn_scalar: PositiveInt = 256
    """Attention scale is this^-0.5."""

    attn_logit_softcapping: PositiveFloat | None = 50.0
    """Scores become this × tanh(scores / this)."""

    layer_types: Annotated[str, comma_separated_names(FULL, SLIDING)] = f"{SLIDING},{FULL}"
    """full_attention or sliding_attention for each layer, repeated."""

    sliding_window: PositiveInt = 4096
    """Window of sliding_attention layers in tokens: the current one and those before it; in the
    encoder, half of it on each side (t5gemma: all of it)."""

    hidden_activation: Literal["silu", "gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    """Activation of the feed-forward's gate."""

    rms_norm_eps: PositiveFloat = 1e-6
    """Added to the mean square in a norm."""

    max_position_embeddings: PositiveInt = 8192
    """Longest context in tokens."""

    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary angles."""

    rope_factor: PositiveFloat | None = None
    """Divisor of the rotary angles (rope_type linear). null: 1."""

    rope_local_base_freq: PositiveFloat | None = None
    """rope_theta of sliding_attention layers, unscaled. null: as in all layers."""

    @property
    def layers(self) -> tuple[LayerType, ...]:
        """Type of each layer."""
        names = islice(cycle(split_names(self.layer_types)), self.num_hidden_layers)
        return tuple(LayerType(name == SLIDING, has_rope=True) for name in names)

    @property
    def rope_parameters(self) -> LlamaRope:
        """Rotary positions of layers of full_attention."""
        if self.rope_factor is None:
            return LlamaRope(rope_theta=self.rope_theta)
        return LlamaRope("linear", self.rope_theta, factor=self.rope_factor)

    @property
    def rotary_dim(self) -> int:
        """Features of a head that are rotated: all of them."""
        return self.head_dim

    def validate(self) -> None:
        heads, of_keys = self.num_attention_heads, self.num_key_value_heads
        if heads % of_keys:
            raise ConfigError(
                f"num_attention_heads {heads} must be divisible by {of_keys} num_key_value_heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} must be even: pairs are rotated")
        if len(split_names(self.layer_types)) > self.num_hidden_layers:
            raise ConfigError(
                f"layer_types {self.layer_types} names more layers than there are, "
                f"{self.num_hidden_layers} num_hidden_layers"
            )


@dataclass(frozen=True)
class T5GemmaModel(ModelSection):
    """T5Gemma architecture; the defaults are T5Gemma 2B-2B."""

    model_type: T5GemmaType = "t5gemma"
    """model_type on the hub."""

    multimodal_parent: PathText | None = None
    """t5gemma2: multimodal model of which exports copy the image weights. null: none."""

    paths: ClassVar[Mapping[str, str]] = {
        "hidden_size": "decoder.hidden_size",
        "num_hidden_layers": "encoder.num_hidden_layers",
        "num_attention_heads": "encoder.num_attention_heads",
    }

    vocab_size: PositiveInt = 256000
    """Rows of the embeddings, at least the tokenizer's size."""

    new_rows: str | None = None
    """Rows that start as the mean of the others, such as 32000-32003,32010; model.add_tokens sets
    it. null: none."""

    tie_word_embeddings: bool = True
    """Use the decoder's embedding as the head's weight too."""

    decoder_sequence_length: PositiveInt = 8
    """Maximum tokens of a target or answer, the end token included."""

    attention_dropout: Probability = 0.0
    """Dropout probability of attention weights."""

    final_logit_softcapping: PositiveFloat | None = 30.0
    """Logits become this × tanh(logits / this)."""

    initializer_range: PositiveFloat = 0.02
    """Standard deviation of random initial weights."""

    bos_token_id: NonNegativeInt = 2
    """First token of the decoder's input."""

    eos_token_ids: Names | None = None
    """All tokens that end an answer, separated by commas. null: eos_token_id."""

    eoi_token_index: NonNegativeInt = 256000
    """t5gemma2: end-of-image token, which has its own embedding."""

    encoder: GemmaStack = field(default_factory=GemmaStack)
    decoder: GemmaStack = field(default_factory=GemmaStack)

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        return self.encoder.num_hidden_layers

    @property
    def max_position_embeddings(self) -> int:
        return self.encoder.max_position_embeddings

    @property
    def stacks(self) -> Mapping[str, GemmaStack]:
        """Encoder and decoder by name."""
        return {name: getattr(self, name) for name in STACKS}

    @property
    def is_merged(self) -> bool:
        """True for t5gemma2: one embedding, one attention to own and encoded keys."""
        return self.model_type == "t5gemma2"

    @property
    def start_token_id(self) -> int:
        return self.bos_token_id

    @property
    def has_dropout(self) -> bool:
        return max(self.dropout_prob, self.attention_dropout) > 0

    def validate(self) -> None:
        super().validate()
        if self.is_merged:
            self._check_merged()
        if self.bos_token_id >= self.vocab_size:
            raise ConfigError(
                f"model.bos_token_id {self.bos_token_id} must be below model.vocab_size "
                f"{self.vocab_size}"
            )

    def _check_merged(self) -> None:
        encoder, decoder = (stack.hidden_size for stack in self.stacks.values())
        if encoder != decoder:
            raise ConfigError(
                f"model.encoder.hidden_size {encoder} and model.decoder.hidden_size {decoder} must "
                "be equal: model.model_type t5gemma2 has one embedding"
            )
        if not self.tie_word_embeddings:
            raise ConfigError("model.model_type t5gemma2 needs model.tie_word_embeddings")
        for name, stack in self.stacks.items():
            if stack.attn_logit_softcapping is not None:
                raise ConfigError(
                    f"model.model_type t5gemma2 needs model.{name}.attn_logit_softcapping null"
                )


@dataclass(frozen=True)
class T5GemmaConfig(RunConfig):
    """Configuration of a T5Gemma run."""

    family: Literal["t5gemma"] = "t5gemma"
    """The model family."""

    embeds_texts: ClassVar[bool] = False
    published_tokenizer: ClassVar[str] = "google/t5gemma-2b-2b-prefixlm"  # that of all sizes

    model: T5GemmaModel = field(default_factory=T5GemmaModel)
    data: Seq2SeqData = field(default_factory=Seq2SeqData)

    def validate(self) -> None:
        super().validate()
        for name, stack in self.model.stacks.items():
            self.check_key_value_heads(
                f"model.{name}.num_key_value_heads", stack.num_key_value_heads
            )
        if self.model.is_merged and self.fp8.enabled and self.fp8.recipe == "delayed":
            raise ContradictionError(
                "fp8.recipe delayed scales each linear layer for one input, but the decoder of "
                "T5Gemma 2 applies those of keys and values to two: set fp8.recipe current",
                {"fp8.recipe": "current"},
                "model.model_type",
            )

    def tensor_parallel_sizes(self) -> dict[str, int]:
        names = "hidden_size", "num_attention_heads", "intermediate_size"
        return super().tensor_parallel_sizes() | {
            f"model.{name}.{n}": getattr(stack, n)
            for name, stack in self.model.stacks.items()
            for n in names
        }

    def min_num_weights(self) -> int:
        m, total = self.model, 0
        for stack in (m.encoder, m.decoder):
            of_attention = 2 * (stack.num_attention_heads + stack.num_key_value_heads)
            a_layer = of_attention * stack.head_dim + 3 * stack.intermediate_size
            total += stack.hidden_size * stack.num_hidden_layers * a_layer
        tables = m.hidden_size + (0 if m.is_merged else m.encoder.hidden_size)
        return total + tables * m.vocab_size

    def linear_input_sizes(self) -> dict[str, int]:
        parts, sizes = self.execution.tensor_parallel, super().linear_input_sizes()
        for name, stack in self.model.stacks.items():
            sharded = {
                f"{name}'s heads × head_dim": stack.num_attention_heads * stack.head_dim,
                f"model.{name}.intermediate_size": stack.intermediate_size,
            }
            sizes[f"model.{name}.hidden_size"] = stack.hidden_size
            sizes |= {f"{n} / execution.tensor_parallel": x // parts for n, x in sharded.items()}
        return sizes
