"""Configuration of BART and its relatives, with Hugging Face's field names.

mBART, M2M100 and NLLB, Marian and Pegasus are this model. What one of them always does,
`modelling/bart/architectures.py` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from config.errors import ConfigError
from config.model import ModelSection, StartToken
from config.sections import RunConfig
from config.task import Seq2SeqData
from config.values import LayerCount, NonNegativeInt, PositiveFloat, PositiveInt, Probability

ModelType = Literal["bart", "mbart", "m2m_100", "marian", "pegasus"]


@dataclass(frozen=True)
class BartModel(ModelSection):
    """Architecture of BART or a relative; the defaults are BART base."""

    paths: ClassVar[Mapping[str, str]] = {
        "num_hidden_layers": "encoder_layers",
        "num_attention_heads": "encoder_attention_heads",
    }

    model_type: ModelType = "bart"
    """model_type on the hub; NLLB's is m2m_100."""

    hidden_size: PositiveInt = 768
    """Features of a token between layers. HF: d_model."""

    vocab_size: PositiveInt = 50265
    """Rows of the embedding, at least the tokenizer's size."""

    decoder_vocab_size: PositiveInt | None = None
    """Marian: rows of the decoder's own embedding, shared with the head. null: one embedding of
    vocab_size rows."""

    new_rows: str | None = None
    """Rows that start as the mean of the others, such as 32000-32003,32010; model.add_tokens sets
    it. null: none."""

    eos_token_id: NonNegativeInt = 2
    pad_token_id: NonNegativeInt = 1

    encoder_layers: LayerCount = 6
    """Layers of the encoder."""

    decoder_layers: LayerCount = 6
    """Layers of the decoder."""

    encoder_attention_heads: PositiveInt = 12
    """Heads of the encoder's attention layers."""

    decoder_attention_heads: PositiveInt = 12
    """Heads of the decoder's attention layers."""

    encoder_ffn_dim: PositiveInt = 3072
    """Features inside a feed-forward layer of the encoder."""

    decoder_ffn_dim: PositiveInt = 3072
    """Features inside a feed-forward layer of the decoder."""

    activation_function: Literal["gelu", "gelu_new", "relu", "silu"] = "gelu"
    """Activation of the feed-forward; gelu is exact, gelu_new its tanh approximation."""

    attention_dropout: Probability = 0.0
    """Dropout probability of attention weights."""

    activation_dropout: Probability = 0.0
    """Dropout probability inside the feed-forward."""

    encoder_layerdrop: Probability = 0.0
    """Layer dropout of pretraining; training here needs 0."""

    decoder_layerdrop: Probability = 0.0
    """Layer dropout of pretraining; training here needs 0."""

    max_position_embeddings: PositiveInt = 1024
    """Maximum tokens of an input, or of a target or answer."""

    init_std: PositiveFloat = 0.02
    """Standard deviation of initial weights."""

    scale_embedding: bool = False
    """Multiply token embeddings by √hidden_size."""

    decoder_sequence_length: PositiveInt = 62
    """Maximum tokens of a target or answer, `<s>` and `</s>` included."""

    bos_token_id: NonNegativeInt | None = 0
    """Token that starts a text. null: none."""

    decoder_start_token_id: NonNegativeInt = 2
    """First token of the decoder's input; mBART is trained with the target's last token there."""

    forced_bos_token_id: NonNegativeInt | None = None
    """First token of every answer. null: any."""

    forced_eos_token_id: NonNegativeInt | None = 2
    """Last token of an answer that reaches the length limit. null: any."""

    @property
    def output_vocab_size(self) -> int:
        return self.decoder_vocab_size or self.vocab_size

    @property
    def num_hidden_layers(self) -> int:
        return self.encoder_layers

    @property
    def tie_word_embeddings(self) -> bool:
        return True

    @property
    def start_token_id(self) -> int:
        return self.decoder_start_token_id

    @property
    def training_start_token(self) -> StartToken:
        return "last" if self.model_type == "mbart" else self.decoder_start_token_id

    @property
    def forced_token_ids(self) -> tuple[int | None, int | None]:
        return self.forced_bos_token_id, self.forced_eos_token_id

    @property
    def suppressed_token_ids(self) -> tuple[int, ...]:
        # Marian's files have a padding token that its training did not.
        return (self.pad_token_id,) if self.model_type == "marian" else ()

    @property
    def has_dropout(self) -> bool:
        return max(self.dropout_prob, self.attention_dropout, self.activation_dropout) > 0

    def validate(self) -> None:
        super().validate()
        field, rows = "vocab_size", self.vocab_size
        if self.decoder_vocab_size is not None:
            self._check_two_vocabularies()
            field, rows = "decoder_vocab_size", self.decoder_vocab_size
        for name in ("eos", "pad", "bos", "decoder_start", "forced_bos", "forced_eos"):
            token = getattr(self, f"{name}_token_id")
            if token is not None and token >= rows:
                raise ConfigError(
                    f"model.{name}_token_id {token} must be below model.{field} {rows}"
                )
        names = [f"model.{stack}_layerdrop" for stack in ("encoder", "decoder")]
        if max(self.encoder_layerdrop, self.decoder_layerdrop) and not self.eval:
            raise ConfigError(
                f"{names[0]} is {self.encoder_layerdrop:g} and {names[1]} "
                f"{self.decoder_layerdrop:g}, but training skips no layers: set both 0"
            )
        for stack in ("encoder", "decoder"):
            heads = getattr(self, f"{stack}_attention_heads")
            if self.hidden_size % heads:
                raise ConfigError(
                    f"model.hidden_size {self.hidden_size} must be divisible by {heads} "
                    f"model.{stack}_attention_heads"
                )
        if self.model_type == "m2m_100" and (self.hidden_size % 2 or self.hidden_size < 4):
            raise ConfigError(
                f"model.hidden_size {self.hidden_size} must be even and at least 4 for the "
                "positions of m2m_100"
            )
        if self.model_type == "m2m_100" and self.decoder_start_token_id == self.pad_token_id:
            raise ConfigError(
                f"model.decoder_start_token_id {self.decoder_start_token_id} must differ from "
                "model.pad_token_id for m2m_100, whose positions do not count padding"
            )
        for name in ("sequence_length", "decoder_sequence_length"):
            if getattr(self, name) > self.max_position_embeddings:
                raise ConfigError(
                    f"model.{name} {getattr(self, name)} must be at most "
                    f"model.max_position_embeddings {self.max_position_embeddings}"
                )

    def _check_two_vocabularies(self) -> None:
        if self.model_type != "marian":
            raise ConfigError(
                f"model.decoder_vocab_size is for model.model_type marian, not {self.model_type}"
            )
        for name in ("add_tokens", "new_rows"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"model.{name} is for models with one vocabulary, but model.decoder_vocab_size "
                    f"is {self.decoder_vocab_size}"
                )


@dataclass(frozen=True)
class BartConfig(RunConfig):
    """Configuration of a run of BART or a relative."""

    family: Literal["bart"] = "bart"
    """The model family."""

    embeds_texts: ClassVar[bool] = False
    published_tokenizer: ClassVar[str] = "facebook/bart-base"  # that of all of BART's sizes

    model: BartModel = field(default_factory=BartModel)
    data: Seq2SeqData = field(default_factory=Seq2SeqData)

    def tensor_parallel_sizes(self) -> dict[str, int]:
        m = self.model
        names = [f"{stack}_{part}" for stack in ("encoder", "decoder")
                 for part in ("attention_heads", "ffn_dim")]  # fmt: skip
        return super().tensor_parallel_sizes() | {f"model.{n}": getattr(m, n) for n in names}

    def validate(self) -> None:
        super().validate()
        if self.model.decoder_vocab_size is not None and self.adapter.trainable_tokens is not None:
            raise ConfigError(
                "adapter.trainable_tokens is for models with one vocabulary, but "
                f"model.decoder_vocab_size is {self.model.decoder_vocab_size}"
            )

    def min_num_weights(self) -> int:
        m = self.model
        encoder = m.encoder_layers * (4 * m.hidden_size + 2 * m.encoder_ffn_dim)
        decoder = m.decoder_layers * (8 * m.hidden_size + 2 * m.decoder_ffn_dim)
        tables = m.vocab_size + (m.decoder_vocab_size or 0)
        if m.model_type != "m2m_100":  # which computes positions
            tables += 2 * m.max_position_embeddings
        return m.hidden_size * (encoder + decoder + tables)

    def linear_input_sizes(self) -> dict[str, int]:
        m, parts = self.model, self.execution.tensor_parallel
        sizes = {n: getattr(m, n) for n in ("hidden_size", "encoder_ffn_dim", "decoder_ffn_dim")}
        shards = {f"model.{n} / execution.tensor_parallel": x // parts for n, x in sizes.items()}
        return super().linear_input_sizes() | shards
