"""Checks that all model families make of a Hugging Face config.json; special token ids."""

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
    _.* | .*\..*                                         # of libraries, such as transformers.js
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
    | (max_window_layers|no_rope_layer_interval)         # layer_types follow from them
    """,
    re.VERBOSE,
)
"""Settings without effect on the output of a trained model: names of files and libraries, versions,
tokens, generation, caches, training, and lengths that nothing depends on."""

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
"""Names of one setting in different model types: some files have two of them."""

MAX_LISTED, MAX_CHARS = 6, 40
"""Limits of a message: settings that it lists, and characters of a name or value."""


def check_hf_settings(
    hf_config: Mapping[str, Any],
    model_type: str,
    supported: Collection[str],
    required: Mapping[str, tuple[Any, Any]] | None = None,
) -> None:
    """Raises ConfigError if a config.json has settings that the model family does not support.

    Only settings that change the model's output count; one sentence names them all.

    Settings are ignored if they are off, have the default of transformers' class, have no effect
    (`NO_EFFECT`) or repeat another one (`SYNONYMS`).

    Args:
        hf_config: content of the config.json.
        supported: settings that the family reads and checks itself.
        required: by name, the value that a setting must have, and Hugging Face's default.
    """
    required = required or {}
    unsupported, unknown = [], []
    for name, (value, default) in required.items():
        actual = hf_config.get(name)
        if (default if actual is None else actual) != value:
            unsupported.append(
                f"{name} {_format_truncated(actual)}, but must have {_format_truncated(value)}"
            )
    for name, value in hf_config.items():
        is_checked = name in supported or name in required
        if not is_checked and not _setting_has_no_effect(name, value, model_type, hf_config):
            unknown.append(f"{format_name(name, MAX_CHARS)} {_format_truncated(value)}")
    if unsupported or unknown:
        raise ConfigError(_unsupported_settings_message(model_type, unsupported, unknown))


def _unsupported_settings_message(
    model_type: str, unsupported: Sequence[str], unknown: Sequence[str]
) -> str:
    """Returns the message about unsupported values and unknown settings of a config.json."""
    parts, advice = list(unsupported), f"no other {model_type} is supported"
    if unknown:
        them, verb = ("them", "are") if len(unknown) > 1 else ("it", "is")
        parts.append(f"{_join_settings(unknown)}, which {verb} not known of the kind {model_type}")
        advice = f"remove {them} only if the model does the same without {them}"
    if any(setting.startswith("quantization") for setting in unknown):
        advice = "give the model before its weights were quantized"
    return f"the model's config.json has {', and '.join(parts)}: {advice}"


def _join_settings(settings: Sequence[str]) -> str:
    more = len(settings) - MAX_LISTED
    *first, last = [*settings[:MAX_LISTED], *([f"{more} more"] if more > 0 else [])]
    return f"{', '.join(first)} and {last}" if first else last


def _format_truncated(value: object) -> str:
    return format_name(format_value(value), MAX_CHARS)


def _setting_has_no_effect(
    name: str, value: Any, model_type: str, hf_config: Mapping[str, Any]
) -> bool:
    if value is None or NO_EFFECT.fullmatch(name):
        return True
    if any(
        name in names and _any_setting_equals(names - {name}, value, hf_config)
        for names in SYNONYMS
    ):
        return True
    model_defaults, common_names = hf_defaults(model_type)
    if name in model_defaults:
        default = model_defaults[name]
        return bool(value == default) or (not value and not default)
    return not value or name in common_names


def _any_setting_equals(names: Collection[str], value: Any, hf_config: Mapping[str, Any]) -> bool:
    return any(hf_config.get(name) == value for name in names)


@cache
def hf_defaults(model_type: str) -> tuple[dict[str, Any], frozenset[str]]:
    """Returns a transformers config class's default settings, and the names that all classes share.

    The names include generation's.
    """
    from transformers import GenerationConfig, PreTrainedConfig

    common = PreTrainedConfig().to_dict() | GenerationConfig().to_dict()
    return hf_config_class(model_type)().to_dict(), frozenset(common)


def hf_config_class(model_type: str) -> Any:
    """Returns transformers' configuration class of a model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def read_token_id(hf_config: JsonObject, name: str, default: int) -> int:
    """Reads a special token id from a config.json, the first one if it lists several.

    Args:
        name: "eos" or "pad".
        default: if there is none, or none of the vocabulary: some files have -1.

    Raises:
        FileError: it is no integer.
    """
    field, value = f"{name}_token_id", hf_config.data.get(f"{name}_token_id")
    if isinstance(value, list) and value:
        value = hf_config.get_counts(field)[0]
    if value is None:
        return default
    if type(value) is not int:
        raise hf_config.error(field, "an integer")
    return value if is_token_id(value, hf_config.get_count("vocab_size")) else default


def is_token_id(token_id: object, vocab_size: int) -> bool:
    """True if a value is a token id of the vocabulary."""
    return type(token_id) is int and 0 <= token_id < vocab_size
