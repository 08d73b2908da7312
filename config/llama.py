"""The configuration of Llama-shaped decoders: what an architecture does, setting by setting.

Llama 2 and 3, Mistral, Ministral 3, Qwen 2 and 3, Phi-3 and 4, Gemma 2 and 3, SmolLM, OLMo 2 and 3,
Granite, and the mixtures of experts Mixtral, Qwen 2 and 3, OLMoE and gpt-oss are this model with
different settings, which their config.json says (`modelling/llama/config_json.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import ClassVar, Literal

from config.base import Section
from config.errors import ConfigError, ContradictionError
from config.gptj import GPTJTraining
from config.model import Model, TiedEmbedding
from config.sections import RunConfig
from config.task import SegmentsData
from config.values import (
    LayerCount,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PathText,
    PositiveFloat,
    PositiveInt,
    Proportion,
)
from files.shown import shown

Architecture = Literal[
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "smollm3", "olmo2",
    "granite", "ministral3", "olmo3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe",
    "gpt_oss",
]  # fmt: skip

WINDOW, FULL, UNROTATED, UNROTATED_WINDOW = "w", "f", "n", "u"
"""Kinds of layers, as `attention.pattern` has them."""


@dataclass(frozen=True)
class LlamaEmbedding(TiedEmbedding):
    """The embedding layers."""

    vocab_size: PositiveInt = 32000

    scale: PositiveFloat = 1.0
    """Factor on embeddings. HF: embedding_multiplier; Gemma: √hidden_size."""


@dataclass(frozen=True)
class LlamaRotary(Section):
    """Positions: pairs of features of queries and keys, turned by angles (arXiv:2104.09864)."""

    theta: PositiveFloat = 10000.0
    """Base of the rotary angles. HF: rope_theta."""

    local_theta: PositiveFloat | None = None
    """The base in layers with a window, unscaled. null: as in all layers."""

    fraction: Proportion = 1.0
    """Fraction of a head's features that is rotated. HF: partial_rotary_factor."""

    type: Literal["default", "linear", "dynamic", "llama3", "longrope", "yarn"] = "default"
    """How angles are scaled for texts longer than those of pretraining. HF: rope_type."""

    factor: PositiveFloat = 1.0
    """How much longer texts get, but with longrope."""

    low_frequency: PositiveFloat = 1.0
    """llama3: wavelengths above original_length / this are scaled. HF: low_freq_factor."""

    high_frequency: PositiveFloat = 4.0
    """llama3: wavelengths below original_length / this are not. HF: high_freq_factor."""

    original_length: PositiveInt | None = None
    """llama3, longrope, yarn: tokens of texts in pretraining. HF:
    original_max_position_embeddings."""

    fast_turns: PositiveFloat = 32.0
    """yarn: features that turn more often in original_length are not scaled. HF: beta_fast."""

    slow_turns: PositiveFloat = 1.0
    """yarn: features that turn less often are scaled by the whole factor. HF: beta_slow."""

    truncate: bool = True
    """yarn: round fast_turns and slow_turns to whole pairs of features."""

    short_factors: str | None = None
    """longrope: divisors of the angles up to original_length, separated by commas, one for each
    pair of features. HF: short_factor."""

    long_factors: str | None = None
    """longrope: the same for longer texts. model.sequence_length decides, with output_length in
    generation. HF: long_factor."""

    attention_factor: PositiveFloat | None = None
    """longrope, yarn: factor on rotated features. null: computed."""

    query_growth: NonNegativeFloat = 0.0
    """Queries are multiplied by 1 + this × log(1 + ⌊position / original_length⌋). HF:
    llama_4_scaling_beta."""

    def validate(self) -> None:
        if self.type in ("llama3", "longrope", "yarn") and self.original_length is None:
            raise ConfigError(f"rotary.type {self.type} needs rotary.original_length")
        if self.query_growth and self.original_length is None:
            raise ConfigError("rotary.query_growth needs rotary.original_length")
        if self.type == "llama3" and self.low_frequency >= self.high_frequency:
            raise ConfigError(
                f"rotary.low_frequency {self.low_frequency} must be below rotary.high_frequency "
                f"{self.high_frequency}"
            )
        if self.type == "yarn" and self.slow_turns > self.fast_turns:
            raise ConfigError(
                f"rotary.slow_turns {self.slow_turns} must be at most rotary.fast_turns "
                f"{self.fast_turns}"
            )
        if self.type == "longrope" and not (self.short_factors and self.long_factors):
            raise ConfigError("rotary.type longrope needs rotary.short_factors and long_factors")
        for name in ("short_factors", "long_factors"):
            numbers(getattr(self, name), f"rotary.{name}")


def numbers(text: str | None, name: str) -> tuple[float, ...]:
    """Positive numbers separated by commas; raises ConfigError, which names the field."""
    try:
        parsed = tuple(map(float, text.split(","))) if text else ()
    except ValueError:
        parsed = (0.0,)
    if not all(0 < x < float("inf") for x in parsed):
        raise ConfigError(f"{name} is {shown(text)}, but must be positive numbers, with commas")
    return parsed


@dataclass(frozen=True)
class LlamaAttention(Section):
    """Attention."""

    heads: PositiveInt = 32
    """Number of attention heads. HF: num_attention_heads."""

    key_value_heads: PositiveInt = 32
    """Heads of keys and values, each for equally many heads. HF: num_key_value_heads."""

    head_size: PositiveInt = 128
    """Features of a head. HF: head_dim."""

    pattern: str = "f"
    """Kind of each layer, repeated: f sees all positions before it, w a window; n and u the same
    without rotary positions. HF: layer_types, no_rope_layers."""

    window: PositiveInt | None = None
    """Positions that a layer with a window sees, its own included. HF: sliding_window."""

    scale: PositiveFloat | None = None
    """Factor on the scores. null: head_size^-0.5. HF: attention_multiplier,
    query_pre_attn_scalar^-0.5."""

    cap: PositiveFloat | None = None
    """Scores become cap × tanh(scores / cap). HF: attn_logit_softcapping."""

    norms: Literal["heads", "projections"] | None = None
    """RMS norms of queries and keys: of each head, or of all together. null: none."""

    input_bias: bool = False
    """Give queries, keys and values a bias."""

    output_bias: bool = False
    """Give the output projection a bias."""

    sinks: bool = False
    """Give each head a learned score beside those of the keys, of nothing."""

    rotary: LlamaRotary = field(default_factory=LlamaRotary)

    def validate(self) -> None:
        if self.heads % self.key_value_heads:
            raise ConfigError(
                f"attention.heads {self.heads} must be divisible by {self.key_value_heads} "
                "attention.key_value_heads"
            )
        kinds = {WINDOW, FULL, UNROTATED, UNROTATED_WINDOW}
        if not self.pattern or set(self.pattern) - kinds:
            raise ConfigError(
                f"attention.pattern is {shown(self.pattern)}, but must be letters f, w, n and u"
            )
        if set(self.pattern) & {WINDOW, UNROTATED_WINDOW} and self.window is None:
            raise ConfigError("attention.pattern has layers with a window: set attention.window")
        rotated = self.rotated
        if rotated < 2 or rotated % 2:
            raise ConfigError(
                f"attention.head_size {self.head_size} × rotary.fraction {self.rotary.fraction} "
                f"must be an even number of features, but is {rotated}"
            )
        for name in ("short_factors", "long_factors"):
            parsed = numbers(getattr(self.rotary, name), f"rotary.{name}")
            if self.rotary.type == "longrope" and len(parsed) != rotated // 2:
                raise ConfigError(
                    f"rotary.{name} has {len(parsed)} numbers, but {rotated // 2} pairs of "
                    "features are turned"
                )

    def window_of(self, kind: str) -> int | None:
        """Positions that a layer of a kind sees, its own included; None: all before it."""
        return self.window if kind in (WINDOW, UNROTATED_WINDOW) else None

    @property
    def rotated(self) -> int:
        """Features of a head that are turned, the first ones."""
        return int(self.head_size * self.rotary.fraction)


@dataclass(frozen=True)
class LlamaExperts(Section):
    """Experts, of which each token works with a few, in place of feed-forward layers."""

    count: NonNegativeInt = 0
    """Experts of a layer, each of model.inner_size features. 0: none. HF: num_experts,
    num_local_experts."""

    chosen: PositiveInt = 1
    """Experts that a token works with. HF: num_experts_per_tok."""

    normalised: bool = True
    """Divide the weights of a token's experts by their sum. HF: norm_topk_prob."""

    shared_size: PositiveInt | None = None
    """Features of an expert for all tokens, with a gate of its own. null: none. HF:
    shared_expert_intermediate_size."""

    biases: bool = False
    """Give the router and the experts' maps biases."""

    gate_limit: PositiveFloat | None = None
    """Inner features are gate × sigmoid(gate_slope × gate) × (up + 1), with the gate at most this
    and up within ± this. null: activation(gate) × up. HF: swiglu_limit."""

    gate_slope: PositiveFloat = 1.702
    """See gate_limit. HF: swiglu_alpha."""

    balance: NonNegativeFloat = 0.0
    """Factor on the loss that balances experts: their number × the sum of each one's share of the
    tokens × its mean probability, over all layers and the tokens of a micro-batch, without padding.
    The loss of an evaluation is without it. HF: router_aux_loss_coef, with output_router_logits."""

    def validate(self) -> None:
        if self.balance and not self.count:
            raise ConfigError("experts.balance needs experts.count")
        if self.count and self.chosen > self.count:
            raise ConfigError(
                f"experts.chosen {self.chosen} must be at most experts.count {self.count}"
            )


@dataclass(frozen=True)
class LlamaModel(Model):
    """The model. The defaults are Llama 2 7B."""

    architecture: Architecture = "llama"
    """Class of the model on the hub. HF: model_type."""

    part_of: PathText | None = None
    """Folder or hub name of a model of texts and images that this is the text part of; an export
    takes over its other weights. null: none."""

    layers: LayerCount = 32
    hidden_size: PositiveInt = 4096

    inner_size: PositiveInt = 11008
    """Features inside a feed-forward layer, or an expert. HF: intermediate_size,
    moe_intermediate_size."""

    sequence_length: PositiveInt = 4096
    """Tokens of a training sample; the most that a prompt has."""

    output_length: PositiveInt = 128
    """Most tokens to generate, the end token included."""

    max_length: PositiveInt = 4096
    """Tokens that the model was made for; dynamic and longrope angles depend on it. HF:
    max_position_embeddings."""

    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of the feed-forward's gate. HF: hidden_act."""

    feed_forward_bias: bool = False
    """Give feed-forward layers biases. HF: mlp_bias."""

    norms: Literal["before", "after", "both"] = "before"
    """RMS norms before attention and feed-forward, after them, or both."""

    norms_from_one: bool = False
    """Scale RMS norms by 1 + weight, as Gemma."""

    norm_epsilon: PositiveFloat = 1e-5
    """Added to the mean square in a norm. HF: rms_norm_eps."""

    residual_scale: Number = 1.0
    """Factor on what attention and feed-forward add. HF: residual_multiplier."""

    logits_divisor: PositiveFloat = 1.0
    """Divisor of the logits. HF: logits_scaling."""

    logits_cap: PositiveFloat | None = None
    """Logits become cap × tanh(logits / cap). HF: final_logit_softcapping."""

    initializer_range: PositiveFloat = 0.02
    """Standard deviation of random initial weights."""

    start_token: int | None = None
    """Token that texts begin with, which the tokenizer adds. HF: bos_token_id."""

    end_token: NonNegativeInt = 2

    end_tokens: str | None = None
    """All tokens that end an answer, separated by commas. null: end_token alone."""

    pad_token: NonNegativeInt = 0
    embedding: LlamaEmbedding = field(default_factory=LlamaEmbedding)
    attention: LlamaAttention = field(default_factory=LlamaAttention)
    experts: LlamaExperts = field(default_factory=LlamaExperts)

    @property
    def kinds(self) -> str:
        """The kind of each layer."""
        return "".join(islice(cycle(self.attention.pattern), self.layers))

    @property
    def further_ends(self) -> tuple[int, ...]:
        listed = self.end_tokens.split(",") if self.end_tokens else []
        return tuple(sorted({int(token) for token in listed} - {self.end_token}))

    def validate(self) -> None:
        super().validate()
        self._check_end_tokens()
        if self.experts.count and self.feed_forward_bias:
            raise ConfigError(
                "model.feed_forward_bias is not for model.experts: set model.experts.biases"
            )
        if len(self.attention.pattern) > self.layers:
            raise ConfigError(
                f"model.attention.pattern has {len(self.attention.pattern)} letters, but there are "
                f"{self.layers} model.layers"
            )

    def _check_end_tokens(self) -> None:
        try:
            known = all(0 <= token < self.embedding.vocab_size for token in self.further_ends)
        except ValueError:
            known = False
        if not known:
            raise ConfigError(
                f"model.end_tokens is {shown(self.end_tokens)}, but must be tokens below "
                f"model.embedding.vocab_size {self.embedding.vocab_size}, with commas"
            )


@dataclass(frozen=True)
class LlamaConfig(RunConfig):
    """A run of a Llama-shaped model."""

    family: Literal["llama"] = "llama"
    """The model family."""

    published_tokenizer: ClassVar[str] = "Qwen/Qwen3-0.6B"

    model: LlamaModel = field(default_factory=LlamaModel)
    training: GPTJTraining = field(default_factory=GPTJTraining)
    data: SegmentsData = field(default_factory=SegmentsData)

    @property
    def experts(self) -> int:
        return self.model.experts.count

    @property
    def adapter_targets(self) -> str:
        return "qkv_proj" if self.model.architecture == "phi3" else super().adapter_targets

    def validate(self) -> None:
        super().validate()
        heads, parts = self.model.attention.key_value_heads, self.execution.tensor_parallel
        if max(heads, parts) % min(heads, parts):
            raise ConfigError(
                f"model.attention.key_value_heads {heads} and execution.tensor_parallel {parts}: "
                "one must be a multiple of the other"
            )
        self._check_expert_groups()
        optimizer = self.training.optimizer
        shares = self.execution.expert_parallel and parts > 1
        if shares and not optimizer.record.shared_parts:
            raise ContradictionError(
                f"{optimizer.name} with execution.expert_parallel is not supported: take adamw",
                {"execution.expert_parallel": False},
                "training.optimizer.name",
            )
        if parts > heads and not optimizer.record.shared_parts:
            raise ConfigError(
                f"{optimizer.name} with execution.tensor_parallel {parts} above "
                f"model.attention.key_value_heads {heads} is not supported: take adamw"
            )

    def expert_weights(self) -> int:
        return 3 * self.experts * self.model.hidden_size * self.model.inner_size

    @property
    def cuts_experts(self) -> bool:
        m = self.model
        only_added = m.norms == "before" and not m.dropout_prob and m.residual_scale == 1
        return super().cuts_experts and only_added

    def _check_expert_groups(self) -> None:
        if self.execution.expert_groups > 1 and not self.cuts_experts:
            raise ConfigError(
                "execution.expert_groups is for layers that only add what experts give: "
                "model.norms before, dropout_prob 0 and residual_scale 1"
            )

    def tensor_parallel_sizes(self) -> dict[str, int]:
        sizes = {"model.attention.heads": self.model.attention.heads}
        if self.execution.expert_parallel:
            sizes["model.experts.count"] = self.model.experts.count
        else:
            sizes["model.inner_size"] = self.model.inner_size
        if self.model.experts.shared_size:
            sizes["model.experts.shared_size"] = self.model.experts.shared_size
        return super().tensor_parallel_sizes() | sizes

    def min_weights(self) -> int:
        m, a = self.model, self.model.attention
        a_layer = 2 * (a.heads + a.key_value_heads) * a.head_size + 3 * m.inner_size * (
            m.experts.count or 1
        )
        tables = 1 if m.embedding.tied else 2
        return m.hidden_size * (m.layers * a_layer + tables * m.embedding.vocab_size)

    def min_bytes(self) -> dict[str, int]:
        m, lengths = self.model, self.model.sequence_length + self.model.output_length
        a = m.attention
        kept = max(min(a.window_of(kind) or lengths, lengths) for kind in m.kinds)
        cached = 2 * a.key_value_heads * a.head_size
        return super().min_bytes() | {
            "the attention scores": self.score_bytes(a.heads),
            "the caches of generation": (
                self._samples_at_once * kept * cached * 2 if m.eval else 0
            ),
        }

    def linear_inputs(self) -> dict[str, int]:
        parts, m = self.execution.tensor_parallel, self.model
        heads = m.attention.heads * m.attention.head_size
        sizes = {"heads × head_size": heads}
        whole = {}
        if self.execution.expert_parallel:
            whole["model.inner_size"] = m.inner_size
        else:
            sizes["model.inner_size"] = m.inner_size
        if m.experts.shared_size:
            sizes["model.experts.shared_size"] = m.experts.shared_size
        cut = {f"{name} / execution.tensor_parallel": n // parts for name, n in sizes.items()}
        return super().linear_inputs() | whole | cut
