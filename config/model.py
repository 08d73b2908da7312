"""Model fields that all model families share.

In the docstrings, HF is the name of the same setting in Hugging Face's model configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from config.base import ConfigSection
from config.errors import ConfigError
from config.values import (
    LayerCount,
    Names,
    NonNegativeInt,
    PositiveInt,
    Probability,
    split_names,
)
from files.formatting import format_value

StartToken = int | Literal["last"] | None
"""First token that a decoder reads with a target: "last": the target's last one; None: padding."""


class QuantConfig(NamedTuple):
    """Weight quantization: bits per weight and group size.

    Attributes:
        bits: of a value.
        group_size: input features that share a scale and a bias.
    """

    bits: int
    group_size: int


@dataclass(frozen=True)
class ModelSection(ConfigSection):
    """Base class of every family's model section, with Hugging Face's field names.

    What programs ask of all models has Hugging Face's name; `field_path` says where it is.
    """

    paths: ClassVar[Mapping[str, str]] = {}
    """Fields whose names are not Hugging Face's, by that."""

    sequence_length: PositiveInt = 512
    """Tokens of an input; shorter ones are padded, longer ones truncated."""

    eval: bool = False
    """Build the model for generation: no dropout, no optimizer."""

    dropout_prob: Probability = 0.0
    """Probability that dropout zeroes an element in training. HF: dropout_rate, resid_pdrop."""

    precision: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type of weights and activations on the device. HF: dtype."""

    quantization: Literal["int8", "int4"] | None = None
    """Weight quantization of linear layers and experts except the head, for generation and below
    adapters."""

    quantization_group_size: PositiveInt = 64
    """Neighboring input features that share a scale and a bias."""

    seed: NonNegativeInt = 42
    """Seed of initial weights, dropout, stochastic rounding and generated data."""

    eos_token_id: NonNegativeInt = 1
    """Token that ends a text; a run takes the tokenizer's."""

    pad_token_id: NonNegativeInt = 0
    """Padding token; a run takes the tokenizer's."""

    add_tokens: Names | None = None
    """Tokens to add to the tokenizer, separated by commas. Their rows start as the mean of the
    others."""

    @property
    def hidden_size(self) -> int:
        """Features of a token between layers, in an encoder-decoder those of the decoder."""
        raise NotImplementedError

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers in each stack (an encoder-decoder has two)."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Number of embedding rows."""
        raise NotImplementedError

    @property
    def output_vocab_size(self) -> int:
        """Number of rows of the LM head."""
        return self.vocab_size

    @property
    def new_rows(self) -> str | None:
        """New embedding rows, which are initialized to the mean of the existing rows."""
        raise NotImplementedError

    @property
    def tie_word_embeddings(self) -> bool | None:
        """True if the LM head shares the embedding's weight.

        None if the family has no such models.
        """
        return None

    @property
    def max_position_embeddings(self) -> int | None:
        """Longest context of the model in tokens; None means no limit."""
        return None

    @classmethod
    def field_path(cls, hf_name: str) -> str:
        """Returns the dotted path of the field that Hugging Face calls `hf_name`."""
        return f"model.{cls.paths.get(hf_name, hf_name)}"

    def validate(self) -> None:
        rows = f"{self.field_path('vocab_size')} {self.vocab_size}"
        for name in ("eos_token_id", "pad_token_id"):
            if getattr(self, name) >= self.vocab_size:
                raise ConfigError(f"model.{name} {getattr(self, name)} must be below {rows}")
        ends = self._eos_token_ids
        if not all(x.isdecimal() and int(x) < self.vocab_size for x in split_names(ends)):
            raise ConfigError(
                f"model.eos_token_ids is {format_value(ends)}, but must be tokens below "
                f"model.vocab_size {self.vocab_size}, with commas"
            )
        if any(row >= self.vocab_size for row in self.embedding_rows_to_initialize()):
            raise ConfigError(
                f"{self.field_path('new_rows')} is {format_value(self.new_rows)}, but must be rows "
                f"below {rows}"
            )

    def embedding_rows_to_initialize(self) -> tuple[int, ...]:
        """Returns the embedding row numbers in `new_rows`."""
        if self.new_rows is None:
            return ()
        from config.row_ranges import parse_row_ranges

        return parse_row_ranges(self.new_rows, self.field_path("new_rows"))

    @property
    def extra_eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end generation besides `eos_token_id`."""
        return tuple(sorted({*map(int, split_names(self._eos_token_ids))} - {self.eos_token_id}))

    @property
    def _eos_token_ids(self) -> str | None:
        return getattr(self, "eos_token_ids", None)

    @property
    def has_dropout(self) -> bool:
        """True if training has dropout."""
        return self.dropout_prob > 0

    @property
    def forced_token_ids(self) -> tuple[int | None, int | None]:
        """Token ids forced at the start and at the truncated end of answers; None: any."""
        return None, None

    @property
    def suppressed_token_ids(self) -> tuple[int, ...]:
        """Token ids that are never generated."""
        return ()

    @property
    def start_token_id(self) -> int | None:
        """Token id that generation starts with; None means the padding token."""
        return None

    @property
    def training_start_token(self) -> StartToken:
        """First token that the decoder reads in training."""
        return self.start_token_id

    @property
    def quant(self) -> QuantConfig | None:
        """Quantization of frozen linear weights; None for the model's precision."""
        if self.quantization is None:
            return None
        return QuantConfig(int(self.quantization.removeprefix("int")), self.quantization_group_size)

    @property
    def layer_quant(self) -> QuantConfig | None:
        """Quantization of the weights that layers receive; None in training.

        Training dequantizes the weights before a layer.
        """
        return self.quant if self.eval else None


@dataclass(frozen=True)
class EmbeddingConfig(ConfigSection):
    """Embedding sizes: number of rows and hidden size."""

    vocab_size: PositiveInt = 32128
    """Rows of the embedding, at least the tokenizer's size."""

    new_rows: str | None = None
    """Rows that start as the mean of the others, such as 32000-32003,32010; model.add_tokens sets
    it. null: none."""


@dataclass(frozen=True)
class TiedEmbeddingConfig(EmbeddingConfig):
    """Embedding sizes of model families whose LM head can share the embedding's weight."""

    tied: bool = False
    """Use the embedding as the head's weight too. HF: tie_word_embeddings."""


@dataclass(frozen=True)
class NestedModelSection(ModelSection):
    """Model section with the nested field names of Graphcore's applications."""

    paths: ClassVar[Mapping[str, str]] = {
        "num_hidden_layers": "layers",
        "num_attention_heads": "attention.heads",
        "vocab_size": "embedding.vocab_size",
        "new_rows": "embedding.new_rows",
        "tie_word_embeddings": "embedding.tied",
    }

    hidden_size: PositiveInt = 512
    """Features of a token between layers. HF: d_model, n_embd."""

    layers: LayerCount = 8
    """Number of layers, in each stack of an encoder-decoder. HF: num_layers, n_layer."""

    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    @property
    def num_hidden_layers(self) -> int:
        return self.layers

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size

    @property
    def new_rows(self) -> str | None:
        return self.embedding.new_rows

    @property
    def tie_word_embeddings(self) -> bool | None:
        return getattr(self.embedding, "tied", None)
