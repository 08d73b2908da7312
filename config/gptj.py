"""GPT-J configuration (Wang and Komatsuzaki, 2021)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from config.base import ConfigSection
from config.errors import ConfigError
from config.sections import EmbeddingConfig, Model, Optimizer, RunConfig, Training
from config.task import SegmentsData
from config.values import LayerCount, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class GPTJEmbeddingConfig(EmbeddingConfig):
    """Embedding sizes of GPT-J."""

    vocab_size: PositiveInt = 50400


@dataclass(frozen=True)
class GPTJAttentionConfig(ConfigSection):
    """Attention sizes and rotary position embeddings of GPT-J."""

    heads: PositiveInt = 16
    """Number of attention heads. HF: n_head."""

    rotary_dim: PositiveInt = 64
    """Features of a head that are rotated, the first ones."""

    rotary_positional_embeddings_base: PositiveInt = 10000
    """Base of the rotary angles. HF: always 10000."""

    def validate(self) -> None:
        if self.rotary_dim % 2:
            raise ConfigError(f"rotary_dim {self.rotary_dim} must be even: pairs are rotated")


@dataclass(frozen=True)
class GPTJModel(Model):
    """GPT-J architecture; the defaults are GPT-J 6B."""

    layers: LayerCount = 28
    hidden_size: PositiveInt = 4096

    sequence_length: PositiveInt = 1024
    """Tokens of a training sample; maximum of a prompt."""

    output_length: PositiveInt = 5
    """Maximum number of generated tokens, the end token included."""

    max_position_embeddings: PositiveInt = 2048
    """Longest context in tokens. HF: n_positions."""

    layer_norm_epsilon: PositiveFloat = 1e-5
    """Added to the variance in a layer norm."""

    initializer_range: PositiveFloat = 0.02
    """Standard deviation of random initial weights."""

    eos_token_id: NonNegativeInt = 50256
    pad_token_id: NonNegativeInt = 50257
    embedding: GPTJEmbeddingConfig = field(default_factory=GPTJEmbeddingConfig)
    attention: GPTJAttentionConfig = field(default_factory=GPTJAttentionConfig)

    @property
    def head_dim(self) -> int:
        """Features of an attention head."""
        return self.hidden_size // self.attention.heads

    @property
    def ffn_hidden_size(self) -> int:
        """Features inside a feed-forward layer."""
        return 4 * self.hidden_size

    def validate(self) -> None:
        heads, rotated = self.attention.heads, self.attention.rotary_dim
        if self.hidden_size % heads:
            raise ConfigError(f"model.hidden_size {self.hidden_size} must be divisible by {heads} "
                              "model.attention.heads")  # fmt: skip
        if rotated > self.head_dim:
            raise ConfigError(
                f"model.attention.rotary_dim {rotated} must be at most the size of a head, "
                f"hidden_size {self.hidden_size} / heads {heads} = {self.head_dim}"
            )
        super().validate()


@dataclass(frozen=True)
class GPTJOptimizer(Optimizer):
    """Optimizer settings with weight decay off by default."""

    weight_decay: NonNegativeFloat = 0.0


@dataclass(frozen=True)
class GPTJTraining(Training):
    """Training settings of decoder-only models."""

    optimizer: GPTJOptimizer = field(default_factory=GPTJOptimizer)


@dataclass(frozen=True)
class GPTJConfig(RunConfig):
    """Configuration of a GPT-J run."""

    family: Literal["gptj"] = "gptj"
    """The model family."""

    published_tokenizer: ClassVar[str] = "EleutherAI/gpt-j-6b"

    model: GPTJModel = field(default_factory=GPTJModel)
    training: GPTJTraining = field(default_factory=GPTJTraining)
    data: SegmentsData = field(default_factory=SegmentsData)

    @property
    def has_classifier(self) -> bool:
        return True

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return super().tensor_parallel_sizes() | {
            "model.attention.heads": self.model.attention.heads
        }

    def min_num_weights(self) -> int:
        m = self.model
        a_layer = 4 * m.hidden_size + 2 * m.ffn_hidden_size
        return m.hidden_size * (
            m.layers * a_layer + self.num_vocab_matrices * m.embedding.vocab_size
        )

    def min_bytes(self) -> dict[str, int]:
        m, lengths = self.model, self.model.sequence_length + self.model.output_length
        return super().min_bytes() | {
            "the caches of generation": (
                self._micro_batch_samples * lengths * m.hidden_size * 2 if m.eval else 0
            ),
        }

    def linear_input_sizes(self) -> dict[str, int]:
        parts = self.execution.tensor_parallel
        return super().linear_input_sizes() | {
            "model.hidden_size / execution.tensor_parallel": self.model.hidden_size // parts
        }
