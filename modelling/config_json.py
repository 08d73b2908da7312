"""What all families share in reading a config.json: settings that are refused, and tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from config.errors import ConfigError
from files.formatting import format_name, format_value
from files.json_files import JsonObject

NO_EFFECT = re.compile(
    r"""
    _.* | .*\..*                                         # of programs, such as transformers.js
    | (.*_)?(version|revision|commit|hash|date|license|author|source)
    | (.*_)?(path|file|files|filename|folder|dir|directory|url|name|names)
    | architectures | auto_map | model_type | torchscript | return_dict(_.*)? | use_return_dict
    | (.*_)?dtype | use_bfloat16 | (.*_)?implementation | unsloth(_.*)? | is_llama_config
    | (.*_)?cache(_.*)? | output_(past|attentions|hidden_states|scores|logits) | pretraining_tp
    | (.*_)?token_(id|ids|index) | [a-z]{2,6}_token | tokenizer(_.*)? | (prefix|suffix)
    | (id2label|label2id|num_labels|problem_type|finetuning_task|task_specific_params)
    | (summary|classifier)_.* | (padding|truncation)_.* | pad_to_multiple_of
    | ignore_index | keys_to_ignore_.* | train(ing)?_.* | seed | model_parallel
    | (base_model|finetuned_from|description|comment|tags|languages?|datasets?|pipeline_tag)
    | use_(flash|sdpa|memory_efficient)_.* | (.*_)?layerdrop | drop_path_rate
    | (.*_)?(dropout|pdrop|dropout_rate|dropout_prob|drop_rate) | (.*_)?jitter_noise
    | (initializer|init)_.* | (.*_)?init_std | gradient_checkpointing | label_smoothing
    | (.*_)?(loss_coef|loss_coefficient|loss_weight) | output_router_logits
    | (n_positions|n_ctx|seq_length|seq_len|max_seq_len|max_seq_length|max_sequence_length)
    | (initial_context_length|model_max_length|trained_length)
    | (max_window_layers|no_rope_layer_interval)         # of which layer_types are made
    """,
    re.VERBOSE,
)
"""Settings that cannot change what a trained model computes: names of files and programs, versions,
tokens, generation, caches, what concerns training alone, lengths that nothing depends on."""

SYNONYMS = (
    {"hidden_size", "n_embd", "d_model", "dim", "model_dim"},
    {"num_hidden_layers", "n_layer", "n_layers", "num_layers"},
    {"num_attention_heads", "n_head", "n_heads", "num_heads"},
    {"num_key_value_heads", "n_kv_heads", "n_head_kv", "num_kv_heads"},
    {"head_dim", "d_kv", "head_size"},
    {"intermediate_size", "d_ff", "ffn_dim", "ffn_hidden_size", "n_inner", "inner_size"},
    {"max_position_embeddings", "n_positions", "n_ctx"},
    {"hidden_act", "hidden_activation", "activation_function", "activation"},
    {"rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon"},
    {"sliding_window", "sliding_window_size", "window_size", "attention_window"},
    {"num_experts", "num_local_experts", "n_routed_experts"},
    {"num_experts_per_tok", "experts_per_token", "num_experts_per_token"},
    {"rope_theta", "rotary_emb_base", "rope_base"},
    {"vocab_size", "n_vocab", "padded_vocab_size"},
)
"""Names that model types have for one thing: some files have two of them."""

MOST_SHOWN, LONGEST = 6, 40
"""Settings that a message lists with their values, and characters of a name or value there."""


def check_hf_settings(
    data: Mapping[str, Any],
    kind: str,
    read: Collection[str],
    needed: Mapping[str, tuple[Any, Any]] | None = None,
) -> None:
    """Raise ConfigError for the settings of a config.json that can change what is computed and that
    the family does not compute with; one sentence names them all.

    Settings that are off, that have the value of transformers' class, that no computation depends
    on (`NO_EFFECT`) and that repeat another one (`SYNONYMS`) are passed over.

    Args:
        kind: the model type.
        read: settings that the family reads, and checks itself.
        needed: by name, the value that a setting must have, and Hugging Face's if it is left out.
    """
    needed = needed or {}
    other, unknown = [], []
    for name, (value, default) in needed.items():
        given = data.get(name)
        if (default if given is None else given) != value:
            other.append(f"{name} {_short(given)}, but must have {_short(value)}")
    for name, value in data.items():
        checked = name in read or name in needed
        if not checked and not _has_no_effect(name, value, kind, data):
            unknown.append(f"{format_name(name, LONGEST)} {_short(value)}")
    if other or unknown:
        raise ConfigError(_refusal(kind, other, unknown))


def _refusal(kind: str, other: Sequence[str], unknown: Sequence[str]) -> str:
    """The sentence about settings with other values than needed, and unknown ones."""
    parts, advice = list(other), f"no other {kind} is supported"
    if unknown:
        them, verb = ("them", "are") if len(unknown) > 1 else ("it", "is")
        parts.append(f"{_listed(unknown)}, which {verb} not known of the kind {kind}")
        advice = f"remove {them} only if the model does the same without {them}"
    if any(setting.startswith("quantization") for setting in unknown):
        advice = "give the model before its weights were quantized"
    return f"the model's config.json has {', and '.join(parts)}: {advice}"


def _listed(settings: Sequence[str]) -> str:
    more = len(settings) - MOST_SHOWN
    *first, last = [*settings[:MOST_SHOWN], *([f"{more} more"] if more > 0 else [])]
    return f"{', '.join(first)} and {last}" if first else last


def _short(value: object) -> str:
    return format_name(format_value(value), LONGEST)


def _has_no_effect(name: str, value: Any, kind: str, data: Mapping[str, Any]) -> bool:
    if value is None or NO_EFFECT.fullmatch(name):
        return True
    if any(name in names and _repeats(names - {name}, value, data) for names in SYNONYMS):
        return True
    usual, common = hf_defaults(kind)
    if name in usual:
        return bool(value == usual[name]) or (not value and not usual[name])
    return not value or name in common


def _repeats(names: Collection[str], value: Any, data: Mapping[str, Any]) -> bool:
    return any(data.get(name) == value for name in names)


@cache
def hf_defaults(kind: str) -> tuple[dict[str, Any], frozenset[str]]:
    """The settings of transformers' class with their values, and those of all models, generation's
    included."""
    from transformers import GenerationConfig, PreTrainedConfig

    common = PreTrainedConfig().to_dict() | GenerationConfig().to_dict()
    return hf_config_class(kind)().to_dict(), frozenset(common)


def hf_config_class(kind: str) -> Any:
    """transformers' class for the configuration of a model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[kind]


def read_token_id(hf_config: JsonObject, name: str, default: int) -> int:
    """The special token `name` (eos, pad) of a config.json, of several the first; the default where
    there is none, or none of the vocabulary: some files have -1.

    Raises:
        FileError: it is no token's number.
    """
    field, given = f"{name}_token_id", hf_config.data.get(f"{name}_token_id")
    if isinstance(given, list) and given:
        given = hf_config.counts(field)[0]
    if given is None:
        return default
    if type(given) is not int:
        raise hf_config.error(field, "an integer")
    return given if is_token_id(given, hf_config.count("vocab_size")) else default


def is_token_id(number: object, vocab_size: int) -> bool:
    """True for the number of a token of the vocabulary."""
    return type(number) is int and 0 <= number < vocab_size
