"""Configuration of Llama-shaped decoders, with the field names of their config.json.

Llama 2 and 3, Mistral, Ministral 3, Qwen 2 and 3, Phi-3 and 4, Gemma 2 and 3, SmolLM, OLMo 2 and 3,
Granite, and the mixtures of experts Mixtral, Qwen 2 and 3, OLMoE and gpt-oss are this model. What
one of them always does, their file says (`modelling/llama/model.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Annotated, ClassVar, Literal, NamedTuple

from config.base import ConfigSection
from config.errors import ConfigError, ContradictionError
from config.gptj import GPTJTraining
from config.model import ModelSection
from config.sections import RunConfig
from config.task import SegmentsData
from config.values import (
    Factors,
    LayerCount,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PathText,
    PositiveFloat,
    PositiveInt,
    Proportion,
    comma_separated_names,
    parse_numbers,
    split_names,
)

ModelType = Literal[
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "smollm3", "olmo2",
    "granite", "ministral3", "olmo3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe",
    "gpt_oss",
]  # fmt: skip

NEEDED: Mapping[str, tuple[str, ...]] = {
    "gemma2": ("query_pre_attn_scalar",),
    "gemma3_text": ("query_pre_attn_scalar",),
    "granite": ("attention_multiplier",),
    "mixtral": ("num_experts",),
    "qwen2_moe": ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    "olmoe": ("num_experts",),
    "gpt_oss": ("num_experts", "swiglu_limit"),
}
"""Settings that are null or 0 by default, which a model type needs."""

MIXTURES = tuple(kind for kind, names in NEEDED.items() if "num_experts" in names)
"""Model types whose feed-forward layers are experts."""

_LLAMA3 = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
)  # fmt: skip
_LONGROPE = ("short_factor", "long_factor", "original_max_position_embeddings")
_YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
ROPE_TYPES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (_LLAMA3, ()),
    "longrope": (_LONGROPE, ("factor", "attention_factor")),
    "yarn": (("factor", "original_max_position_embeddings"), _YARN),
}
"""Ways of scaling rotary positions: settings that each needs, and those that it may have."""

SLIDING, FULL = "sliding_attention", "full_attention"


class LayerType(NamedTuple):
    """The type of a layer: full or sliding attention, with or without rotary positions."""

    is_sliding: bool
    has_rope: bool


@dataclass(frozen=True)
class LlamaRope(ConfigSection):
    """Rotary position embeddings: pairs of features rotated by angles (arXiv:2104.09864)."""

    rope_type: Literal["default", "linear", "dynamic", "llama3", "longrope", "yarn"] = "default"
    """How angles are scaled for texts longer than in pretraining."""

    rope_theta: PositiveFloat = 10000.0
    """Base of the angles."""

    partial_rotary_factor: Proportion = 1.0
    """Fraction of a head's features that is rotated."""

    factor: PositiveFloat | None = None
    """Ratio of the new context to that of pretraining. null, with longrope: max_position_embeddings
    / original_max_position_embeddings."""

    original_max_position_embeddings: PositiveInt | None = None
    """llama3, longrope, yarn: context of pretraining in tokens."""

    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths above original_max_position_embeddings / this are scaled."""

    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths below original_max_position_embeddings / this are not."""

    beta_fast: PositiveFloat = 32.0
    """yarn: dimensions with more rotations over the pretraining context are not scaled."""

    beta_slow: PositiveFloat = 1.0
    """yarn: dimensions with fewer rotations are scaled by the full factor."""

    truncate: bool = True
    """yarn: round the bounds between them to whole dimension pairs."""

    mscale: NonNegativeFloat | None = None
    """yarn: attention factor, the ratio of slopes mscale / mscale_all_dim."""

    mscale_all_dim: NonNegativeFloat | None = None
    """yarn: see mscale. null: slope 0.1 alone."""

    short_factor: Factors | None = None
    """longrope: divisors of the angles, one per dimension pair, up to the pretraining context."""

    long_factor: Factors | None = None
    """longrope: the same beyond it. model.sequence_length decides, with output_length in
    generation."""

    attention_factor: PositiveFloat | None = None
    """longrope, yarn: factor on rotated features. null: computed."""

    llama_4_scaling_beta: NonNegativeFloat | None = None
    """Queries are multiplied by 1 + this × log(1 + ⌊position / original_max_position_embeddings⌋).
    null: by 1."""

    def validate(self) -> None:
        needed = dict.fromkeys(ROPE_TYPES[self.rope_type][0], f"rope_type {self.rope_type}")
        if self.llama_4_scaling_beta:
            needed |= {"original_max_position_embeddings": "llama_4_scaling_beta"}
        for name, by in needed.items():
            if getattr(self, name) is None:
                raise ConfigError(f"rope_parameters.{by} needs rope_parameters.{name}")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"rope_parameters.low_freq_factor {self.low_freq_factor} must be below "
                f"high_freq_factor {self.high_freq_factor}"
            )
        if self.beta_slow > self.beta_fast:
            raise ConfigError(
                f"rope_parameters.beta_slow {self.beta_slow} must be at most beta_fast "
                f"{self.beta_fast}"
            )


@dataclass(frozen=True)
class LlamaModel(ModelSection):
    """Llama architecture; the defaults are Llama 2 7B."""

    model_type: ModelType = "llama"
    """model_type on the hub."""

    multimodal_parent: PathText | None = None
    """Multimodal model that this is the text part of: exports copy its other weights. null:
    none."""

    vocab_size: PositiveInt = 32000
    """Rows of the embedding, at least the tokenizer's size."""

    new_rows: str | None = None
    """Rows that start as the mean of the others, such as 32000-32003,32010; model.add_tokens sets
    it. null: none."""

    tie_word_embeddings: bool = False
    """Use the embedding as the head's weight too."""

    num_hidden_layers: LayerCount = 32
    """Number of layers."""

    hidden_size: PositiveInt = 4096
    """Features of a token between layers."""

    intermediate_size: PositiveInt = 11008
    """Features inside a feed-forward layer or expert."""

    sequence_length: PositiveInt = 4096
    """Tokens of a training sample; maximum of a prompt."""

    output_length: PositiveInt = 128
    """Maximum number of generated tokens, the end token included."""

    max_position_embeddings: PositiveInt = 4096
    """Longest context; dynamic and longrope angles depend on it."""

    num_attention_heads: PositiveInt = 32
    """Number of attention heads."""

    num_key_value_heads: PositiveInt = 32
    """Key and value heads, each shared by equally many query heads."""

    head_dim: PositiveInt = 128
    """Features of a head."""

    attention_bias: bool = False
    """Biases of queries, keys, values and output (qwen2_moe: not of the output)."""

    layer_types: Annotated[str, comma_separated_names(FULL, SLIDING)] | None = None
    """full_attention or sliding_attention for each layer, repeated. null: sliding_attention if
    there is a sliding_window."""

    sliding_window: PositiveInt | None = None
    """Window of sliding_attention layers in tokens, the current one included."""

    no_rope_layers: Annotated[str, comma_separated_names("0", "1")] | None = None
    """smollm3: 1 for layers with rotary positions, else 0, repeated. null: all 1."""

    query_pre_attn_scalar: PositiveInt | None = None
    """Gemma: attention scale is this^-0.5. null: head_dim^-0.5."""

    attention_multiplier: PositiveFloat | None = None
    """granite: attention scale. null: head_dim^-0.5."""

    attn_logit_softcapping: PositiveFloat | None = None
    """Scores become this × tanh(scores / this)."""

    final_logit_softcapping: PositiveFloat | None = None
    """Logits become this × tanh(logits / this)."""

    hidden_act: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    """Activation of the feed-forward's gate."""

    mlp_bias: bool = False
    """Biases of feed-forward layers."""

    rms_norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in a norm."""

    embedding_multiplier: PositiveFloat = 1.0
    """Factor on embeddings; Gemma's is always √hidden_size."""

    residual_multiplier: Number = 1.0
    """Factor on branch outputs before the residual addition."""

    logits_scaling: PositiveFloat = 1.0
    """Divisor of the logits."""

    num_experts: NonNegativeInt = 0
    """Experts of a layer. 0: none. HF: also num_local_experts."""

    num_experts_per_tok: PositiveInt = 1
    """Experts per token."""

    moe_intermediate_size: PositiveInt | None = None
    """Features of an expert. null: intermediate_size."""

    norm_topk_prob: bool = True
    """Normalize the weights of a token's experts to sum 1."""

    shared_expert_intermediate_size: PositiveInt | None = None
    """Features of an expert for all tokens with its own gate. null: none."""

    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss: experts × the sum of each one's share of tokens × mean
    probability, over all layers and the tokens of a micro-batch. A config.json's counts with
    output_router_logits."""

    swiglu_limit: PositiveFloat | None = None
    """gpt_oss: features are gate × sigmoid(swiglu_alpha × gate) × (up + 1), with gate at most this
    and up within ± this. null: hidden_act(gate) × up."""

    swiglu_alpha: PositiveFloat = 1.702
    """gpt-oss: factor on the gate inside the sigmoid."""

    initializer_range: PositiveFloat = 0.02
    """Standard deviation of random initial weights."""

    bos_token_id: int | None = None
    """Token that texts start with; the tokenizer adds it."""

    eos_token_id: NonNegativeInt = 2

    eos_token_ids: Names | None = None
    """All tokens that end an answer, separated by commas. null: eos_token_id."""

    rope_local_base_freq: PositiveFloat | None = None
    """rope_theta of sliding_attention layers, unscaled. null: as in all layers."""

    rope_parameters: LlamaRope = field(default_factory=LlamaRope)

    @property
    def layers(self) -> tuple[LayerType, ...]:
        """Type of each layer."""
        types = split_names(self.layer_types) or (SLIDING if self.sliding_window else FULL,)
        ropes = split_names(self.no_rope_layers) or ("1",)
        pairs = zip(cycle(types), cycle(ropes), strict=False)
        found = (LayerType(name == SLIDING, rope == "1") for name, rope in pairs)
        return tuple(islice(found, self.num_hidden_layers))

    @property
    def rotary_dim(self) -> int:
        """Features of a head that are rotated, the first ones."""
        return int(self.head_dim * self.rope_parameters.partial_rotary_factor)

    @property
    def ffn_hidden_size(self) -> int:
        """Features inside a feed-forward layer or an expert."""
        return self.moe_intermediate_size or self.intermediate_size

    def validate(self) -> None:
        super().validate()
        heads, of_keys = self.num_attention_heads, self.num_key_value_heads
        if heads % of_keys:
            raise ConfigError(
                f"model.num_attention_heads {heads} must be divisible by {of_keys} "
                "model.num_key_value_heads"
            )
        self._check_layer_lists()
        self._check_rotary_dim()
        self._check_experts()
        for name in NEEDED.get(self.model_type, ()):
            if not getattr(self, name):
                raise ConfigError(f"model.model_type {self.model_type} needs model.{name}")

    def _check_layer_lists(self) -> None:
        for name in ("layer_types", "no_rope_layers"):
            count = len(split_names(getattr(self, name)))
            if count > self.num_hidden_layers:
                raise ConfigError(
                    f"model.{name} names {count} layers, but there are "
                    f"{self.num_hidden_layers} model.num_hidden_layers"
                )
        if any(layer.is_sliding for layer in self.layers) and self.sliding_window is None:
            raise ConfigError(f"model.layer_types has {SLIDING}: set model.sliding_window")

    def _check_rotary_dim(self) -> None:
        rope, dim = self.rope_parameters, self.rotary_dim
        if dim < 2 or dim % 2:
            raise ConfigError(
                f"model.head_dim {self.head_dim} × rope_parameters.partial_rotary_factor "
                f"{rope.partial_rotary_factor} must be an even number of features, but is {dim}"
            )
        for name in ("short_factor", "long_factor"):
            count = len(parse_numbers(getattr(rope, name)))
            if rope.rope_type == "longrope" and count != dim // 2:
                raise ConfigError(
                    f"rope_parameters.{name} has {count} numbers, but {dim // 2} pairs of "
                    "features are turned"
                )

    def _check_experts(self) -> None:
        if self.num_experts and self.model_type not in MIXTURES:
            raise ConfigError(
                f"model.num_experts is for model.model_type {', '.join(MIXTURES)}, not "
                f"{self.model_type}"
            )
        if self.router_aux_loss_coef and not self.num_experts:
            raise ConfigError("model.router_aux_loss_coef needs model.num_experts")
        if self.num_experts and self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"model.num_experts_per_tok {self.num_experts_per_tok} must be at most "
                f"model.num_experts {self.num_experts}"
            )


WITHOUT_CLASSIFIER = ("granite", "olmoe")
"""Model types of which transformers has no classifier."""


@dataclass(frozen=True)
class LlamaConfig(RunConfig):
    """Configuration of a run of a Llama-shaped model."""

    family: Literal["llama"] = "llama"
    """The model family."""

    published_tokenizer: ClassVar[str] = "Qwen/Qwen3-0.6B"

    model: LlamaModel = field(default_factory=LlamaModel)
    training: GPTJTraining = field(default_factory=GPTJTraining)
    data: SegmentsData = field(default_factory=SegmentsData)

    @property
    def has_classifier(self) -> bool:
        return self.model.model_type not in WITHOUT_CLASSIFIER

    @property
    def num_experts(self) -> int:
        return self.model.num_experts

    @property
    def adapter_targets(self) -> str:
        return "qkv_proj" if self.model.model_type == "phi3" else super().adapter_targets

    def validate(self) -> None:
        super().validate()
        self.check_key_value_heads("model.num_key_value_heads", self.model.num_key_value_heads)
        if self.execution.expert_groups > 1 and not self.can_group_experts:
            raise ConfigError(
                "execution.expert_groups is for layers that only add what experts give: "
                "model.dropout_prob 0 and residual_multiplier 1"
            )
        if self.training.needs_whole_batch and self.model.router_aux_loss_coef:
            raise ContradictionError(
                f"training.objective {self.training.objective} does not balance experts: leave out "
                "model.router_aux_loss_coef",
                {"model.router_aux_loss_coef": 0.0},
                "training.objective",
            )
        optimizer = self.training.optimizer
        shares = self.execution.expert_parallel and self.execution.tensor_parallel > 1
        if shares and not optimizer.registry_entry.allows_shard_replicas:
            raise ContradictionError(
                f"{optimizer.name} with execution.expert_parallel is not supported: take adamw",
                {"execution.expert_parallel": False},
                "training.optimizer.name",
            )

    def num_expert_weights(self) -> int:
        return 3 * self.num_experts * self.model.hidden_size * self.model.ffn_hidden_size

    @property
    def can_group_experts(self) -> bool:
        only_added = not self.model.dropout_prob and self.model.residual_multiplier == 1
        return super().can_group_experts and only_added

    def _intermediate_sizes(self) -> tuple[dict[str, int], dict[str, int]]:
        """Returns the intermediate sizes that tensor parallelism shards, and unsharded experts'."""
        m, sharded, full = self.model, dict[str, int](), dict[str, int]()
        name = "moe_intermediate_size" if m.moe_intermediate_size else "intermediate_size"
        (full if self.execution.expert_parallel else sharded)[f"model.{name}"] = m.ffn_hidden_size
        if m.shared_expert_intermediate_size:
            name = "model.shared_expert_intermediate_size"
            sharded[name] = m.shared_expert_intermediate_size
        return sharded, full

    def tensor_parallel_sizes(self) -> dict[str, int]:
        sizes = {"model.num_attention_heads": self.model.num_attention_heads}
        if self.execution.expert_parallel:
            sizes["model.num_experts"] = self.num_experts
        return super().tensor_parallel_sizes() | sizes | self._intermediate_sizes()[0]

    def min_num_weights(self) -> int:
        m = self.model
        of_attention = 2 * (m.num_attention_heads + m.num_key_value_heads) * m.head_dim
        a_layer = of_attention + 3 * m.ffn_hidden_size * (m.num_experts or 1)
        tables = self.num_vocab_matrices
        return m.hidden_size * (m.num_hidden_layers * a_layer + tables * m.vocab_size)

    def min_bytes(self) -> dict[str, int]:
        m, length = self.model, self.model.sequence_length + self.model.output_length
        window = min(m.sliding_window or length, length)
        kept = window if all(layer.is_sliding for layer in m.layers) else length
        cached = 2 * m.num_key_value_heads * m.head_dim
        return super().min_bytes() | {
            "the caches of generation": (
                self._micro_batch_samples * kept * cached * 2 if m.eval else 0
            ),
        }

    def linear_input_sizes(self) -> dict[str, int]:
        parts, m = self.execution.tensor_parallel, self.model
        sharded, full = self._intermediate_sizes()
        sharded = {"heads × head_dim": m.num_attention_heads * m.head_dim} | sharded
        local = {f"{name} / execution.tensor_parallel": n // parts for name, n in sharded.items()}
        return super().linear_input_sizes() | full | local
