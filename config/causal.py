"""What the configurations of decoder-only language models have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from config.errors import ConfigError
from config.sections import Data, Model, Optimizer, Training
from config.values import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class CausalModel(Model):
    """What a decoder-only model has."""

    sequence_length: PositiveInt = 1024
    """Tokens of a training sample; the most that a prompt has."""

    output_length: PositiveInt = 5
    """Most tokens that are generated, the end token included."""

    initializer_range: PositiveFloat = 0.02
    """Standard deviation of initial weights, where none are loaded. HF: initializer_range."""

    end_token: NonNegativeInt = 50256
    """Token that ends a text; validation takes the tokenizer's. HF: eos_token_id."""

    pad_token: NonNegativeInt = 50257
    """Token behind the end of a generated text; validation takes the tokenizer's."""

    def check_tokens(self) -> None:
        """Raise ConfigError if a token is not in the vocabulary."""
        for name in ("end_token", "pad_token"):
            if getattr(self, name) >= self.embedding.vocab_size:
                raise ConfigError(
                    f"model.{name} {getattr(self, name)} must be below "
                    f"model.embedding.vocab_size {self.embedding.vocab_size}"
                )


@dataclass(frozen=True)
class CausalOptimizer(Optimizer):
    """As `Optimizer`, by default without weight decay."""

    weight_decay: NonNegativeFloat = 0.0
    """Part of a weight, times the learning rate, taken from it at each step."""


@dataclass(frozen=True)
class CausalTraining(Training):
    """What affects the result of training."""

    optimizer: CausalOptimizer = field(default_factory=CausalOptimizer)


@dataclass(frozen=True)
class CausalData(Data):
    """What to train and validate on."""

    packing: bool = True
    """Join the texts and cut them into full samples, or, if false, pad each to a sample."""

    answers_only: bool = False
    """Learn to predict the answers alone, and not each token of the prompts too."""

    separator: str = " target:"
    """Text between a prompt and what the model writes, after which a space follows."""
