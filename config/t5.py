"""T5 configuration, for T5 v1.0 (2019), T5 v1.1, FLAN-T5, FLAN-UL2, mT5, umT5 and ByT5.

They differ in the feed-forward layers and the head, ByT5 in the depth of its decoder, umT5 in its
position biases. Raffel et al., arXiv:1910.10683; Shazeer, arXiv:2002.05202 (v1.1's gates); Xue et
al., arXiv:2010.11934 (mT5) and arXiv:2105.13626 (ByT5); Chung et al., arXiv:2210.11416 (FLAN-T5);
Tay et al., arXiv:2205.05131 (UL2); Chung et al., arXiv:2304.09151 (umT5).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from config.base import ConfigSection
from config.errors import ConfigError
from config.sections import Model, RunConfig, TiedEmbeddingConfig
from config.task import Seq2SeqData
from config.values import LayerCount, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class T5AttentionConfig(ConfigSection):
    """Attention sizes and relative position biases of T5."""

    heads: PositiveInt = 6
    """Number of attention heads. HF: num_heads."""

    d_kv: PositiveInt = 64
    """Features of a head; heads × d_kv need not be hidden_size."""

    relative_attention_num_buckets: PositiveInt = 32
    """Buckets of relative positions, with a learned bias each per head."""

    relative_attention_max_distance: PositiveInt = 128
    """Distance in tokens from which on the last bucket applies."""

    def validate(self) -> None:
        buckets = self.relative_attention_num_buckets
        distance = self.relative_attention_max_distance
        # Half of the buckets hold one distance each, and the encoder halves them once more for
        # its two directions; the others grow with the logarithm up to the maximum distance.
        if buckets % 4 or distance <= buckets // 2:
            raise ConfigError(
                f"relative_attention_num_buckets {buckets} must be divisible by 4, and "
                f"relative_attention_max_distance {distance} more than half of it"
            )


@dataclass(frozen=True)
class T5Model(Model):
    """T5 architecture; the defaults are FLAN-T5 small."""

    architecture: Literal["t5", "mt5", "umt5"] = "t5"
    """model_type on the hub; umt5 has position biases in each layer. HF: model_type."""

    decoder_layers: LayerCount | None = None
    """Number of decoder layers. null: model.layers. HF: num_decoder_layers."""

    d_ff: PositiveInt = 1024
    """Features inside a feed-forward layer."""

    is_gated_act: bool = True
    """Gated feed-forward, as all but T5 of 2019. HF: feed_forward_proj gated-..."""

    activation: Literal["gelu_tanh", "relu", "silu"] = "gelu_tanh"
    """Activation of the feed-forward, or of its gate. HF: feed_forward_proj."""

    scale_decoder_outputs: bool = False
    """Multiply the head's input by hidden_size^-0.5, as T5 of 2019. HF: scale_decoder_outputs;
    umt5, and t5 before transformers 5: tie_word_embeddings."""

    decoder_sequence_length: PositiveInt = 8
    """Maximum tokens of a target or answer, `</s>` included."""

    layer_norm_epsilon: PositiveFloat = 1e-6
    """Added to the mean square in a layer norm."""

    scale_ff: PositiveFloat = 1.0
    """Divisor of activations inside the feed-forward, undone after it: keeps float16 in range."""

    embedding: TiedEmbeddingConfig = field(default_factory=TiedEmbeddingConfig)
    attention: T5AttentionConfig = field(default_factory=T5AttentionConfig)

    @property
    def num_decoder_layers(self) -> int:
        """Number of decoder layers."""
        return self.layers if self.decoder_layers is None else self.decoder_layers

    def validate(self) -> None:
        super().validate()
        if self.architecture == "mt5" and self.scale_decoder_outputs:
            raise ConfigError(
                "model.scale_decoder_outputs is for model.architecture t5: mt5 has no such model"
            )
        if self.architecture == "umt5" and self.embedding.tied and not self.scale_decoder_outputs:
            raise ConfigError(
                "model.embedding.tied of a umt5 needs model.scale_decoder_outputs: its config.json "
                "has one setting for both, tie_word_embeddings"
            )


@dataclass(frozen=True)
class T5Config(RunConfig):
    """Configuration of a T5 run."""

    family: Literal["t5"] = "t5"
    """The model family."""

    published_tokenizer: ClassVar[str] = "google/flan-t5-small"  # that of all sizes

    model: T5Model = field(default_factory=T5Model)
    data: Seq2SeqData = field(default_factory=Seq2SeqData)

    @property
    def has_classifier(self) -> bool:
        return True

    @property
    def adapter_targets(self) -> str:
        return "q,v"

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return super().tensor_parallel_sizes() | {
            "model.attention.heads": self.model.attention.heads,
            "model.d_ff": self.model.d_ff,
        }

    def min_num_weights(self) -> int:
        m = self.model
        inner = m.attention.heads * m.attention.d_kv
        feed_forward = (2 + m.is_gated_act) * m.d_ff
        encoder = m.layers * (4 * inner + feed_forward)
        decoder = m.num_decoder_layers * (2 * 4 * inner + feed_forward)
        tables = self.num_vocab_matrices
        return m.hidden_size * (encoder + decoder + tables * m.embedding.vocab_size)

    def min_bytes(self) -> dict[str, int]:
        m = self.model
        buckets = m.attention.relative_attention_num_buckets
        return super().min_bytes() | {
            "the positions of the answers": 4 * m.decoder_sequence_length**2,
            "the relative positions": m.attention.heads * buckets * 4,
        }

    def linear_input_sizes(self) -> dict[str, int]:
        attention, parts = self.model.attention, self.execution.tensor_parallel
        return super().linear_input_sizes() | {
            "heads × d_kv / execution.tensor_parallel": attention.heads * attention.d_kv // parts,
            "model.d_ff / execution.tensor_parallel": self.model.d_ff // parts,
        }
