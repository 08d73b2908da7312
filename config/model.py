"""What describes a model, whatever is done with it.

In the docstrings, HF is the name of the same setting in Hugging Face's model configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from config.base import Section
from config.errors import ConfigError
from config.rows import numbered_rows
from config.values import LayerCount, Names, NonNegativeInt, PositiveInt, Probability
from files.shown import shown


class FewBits(NamedTuple):
    """How weights are held in few bits.

    Attributes:
        bits: of a value.
        group_size: input features that share a scale and a bias.
    """

    bits: int
    group_size: int


@dataclass(frozen=True)
class Embedding(Section):
    """The embedding layers."""

    vocab_size: PositiveInt = 32128
    """Rows of the embedding, at least the tokenizer's size."""

    new_rows: str | None = None
    """Rows that begin with the mean of the others, such as 32000-32003,32010, where the model that
    is loaded has none, or untrained ones; model.add_tokens sets it. null: none."""

    def validate(self) -> None:
        if any(row >= self.vocab_size for row in self.rows_to_begin()):
            raise ConfigError(
                f"embedding.new_rows is {shown(self.new_rows)}, but embedding.vocab_size is "
                f"{self.vocab_size}: name rows below it"
            )

    def rows_to_begin(self) -> tuple[int, ...]:
        """The rows that `new_rows` names."""
        return numbered_rows(self.new_rows, "embedding.new_rows")


@dataclass(frozen=True)
class TiedEmbedding(Embedding):
    """The embedding layers of families some of whose models have one table for both ends."""

    tied: bool = False
    """Use the embedding as the head's weight too. HF: tie_word_embeddings."""


@dataclass(frozen=True)
class Model(Section):
    """What every model has; a family adds its own fields."""

    layers: LayerCount = 8
    """Number of layers, in each stack of an encoder-decoder. HF: num_layers, n_layer,
    num_hidden_layers."""

    hidden_size: PositiveInt = 512
    """Features of a token between layers. HF: d_model, n_embd."""

    sequence_length: PositiveInt = 512
    """Tokens of an input; shorter ones are padded, longer ones cut."""

    eval: bool = False
    """Build the model for generation: no dropout, no optimizer."""

    dropout_prob: Probability = 0.0
    """Probability that dropout zeroes an element in training. HF: dropout_rate, resid_pdrop."""

    precision: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type of weights and activations on the device. HF: dtype."""

    quantisation: Literal["int8", "int4"] | None = None
    """Hold the weights of linear layers and experts, but the head's, in 8 or 4 bits: to generate,
    or to train adapters beside them."""

    quantisation_group_size: PositiveInt = 64
    """Input features of a linear layer whose weights in few bits share a scale and a bias."""

    seed: NonNegativeInt = 42
    """Seed of initial weights, dropout, stochastic rounding and generated data."""

    end_token: NonNegativeInt = 1
    """Token that ends a text; a run takes the tokenizer's. HF: eos_token_id."""

    pad_token: NonNegativeInt = 0
    """Token after the end of a text; a run takes the tokenizer's."""

    add_tokens: Names | None = None
    """Tokens that the tokenizer gets, separated by commas. Their rows in the embedding and the head
    begin with the mean of the others."""

    embedding: Embedding = field(default_factory=Embedding)

    @property
    def made_for(self) -> int | None:
        """Tokens that the model was made for; None: it knows no limit."""
        return getattr(self, "max_length", None)

    def validate(self) -> None:
        for name in ("end_token", "pad_token"):
            if getattr(self, name) >= self.embedding.vocab_size:
                raise ConfigError(
                    f"model.{name} {getattr(self, name)} must be below "
                    f"model.embedding.vocab_size {self.embedding.vocab_size}"
                )

    @property
    def further_ends(self) -> tuple[int, ...]:
        """Tokens that end what is generated besides `end_token`; a family may have some."""
        return ()

    @property
    def few_bits(self) -> FewBits | None:
        """How frozen weights of linear layers are held; None: in `precision`."""
        if self.quantisation is None:
            return None
        return FewBits(int(self.quantisation.removeprefix("int")), self.quantisation_group_size)

    @property
    def few_bits_in_layers(self) -> FewBits | None:
        """`few_bits`, if layers take packed weights; in training, they take whole ones."""
        return self.few_bits if self.eval else None
