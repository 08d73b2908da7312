"""Files that make a model folder one that sentence-transformers loads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from config.sections import RunConfig
from files.atomic_writing import write_text_atomically
from files.formatting import format_path
from files.json_files import JsonObject, read_json_object

_MODULES = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
"""Class of each module of sentence-transformers by the folder of its files."""
_POOLING_MODES = {"mean": "mean_tokens", "last": "lasttoken", "eos": "lasttoken"}
_POOLING_NAMES = {"mean": "mean", "mean_tokens": "mean", "lasttoken": "last"}
MODULES = "modules.json"
_PREFIX = re.compile(r"([^{}]+)\{[^{}]+\}")
"""A template that is a text and then a column."""


def embedding_config_json_fields(config: RunConfig, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that make a language model's config.json that of the model without a head.

    Args:
        hf_config: the language model's.
    """
    architecture = str(hf_config["architectures"][0])
    name = architecture.removesuffix("ForConditionalGeneration")
    name = f"{name}EncoderModel" if name != architecture else _base_model_name(architecture)
    is_causal = {"is_causal": False} if config.training.bidirectional else {}
    return {"architectures": [name], **is_causal}


def _base_model_name(architecture: str) -> str:
    name = architecture.removesuffix("ForCausalLM")
    return f"{name}TextModel" if name == "Gemma3" else f"{name}Model"


def embedding_run_settings(
    folder: Path, hf_config: JsonObject
) -> tuple[dict[str, Any], JsonObject]:
    """Returns an embedding model's training settings, and its config.json without them.

    Of other folders there are none.

    Raises:
        ConfigError: its modules are not those that are supported.
    """
    if not (folder / MODULES).is_file():
        return {}, hf_config
    modules = {str(m["type"]).split(".")[-1]: m["path"] for m in _read_list(folder / MODULES)}
    if unknown := modules.keys() - {*_MODULES.values()}:
        raise ConfigError(
            f"{format_path(folder)} has the module {sorted(unknown)[0]} of sentence-transformers, "
            "but only pooling and normalisation are supported"
        )
    if "Pooling" not in modules:
        raise ConfigError(f"{format_path(folder)} has no module Pooling of sentence-transformers")
    data = dict(hf_config.data)
    settings: dict[str, Any] = {"objective": "contrastive"}
    settings["pooling"] = _read_pooling(folder, modules["Pooling"])
    if data.pop("is_causal", True) is False:
        settings["bidirectional"] = True
    return {"training": settings}, hf_config.with_data(data)


def _read_list(path: Path) -> list[dict[str, Any]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    is_list = isinstance(content, list) and all({"type", "path"} <= {*m} for m in content)
    if not is_list:
        raise ConfigError(f"{format_path(path)} is no list of modules of sentence-transformers")
    return content


def _read_pooling(folder: Path, path: str) -> str:
    """Reads how a folder's model pools tokens, in the names of `training.pooling`."""
    data = read_json_object(folder / path / "config.json").data
    modes = {name.removeprefix("pooling_mode_") for name, value in data.items() if value is True}
    modes |= {str(data["pooling_mode"])} if "pooling_mode" in data else set()
    names = [_POOLING_NAMES[mode] for mode in modes if mode in _POOLING_NAMES]
    if len(names) != 1 or len(modes - {"include_prompt"}) != 1:
        raise ConfigError(
            f"{format_path(folder)} pools by {', '.join(sorted(modes - {'include_prompt'}))}, but "
            "mean and lasttoken are supported"
        )
    return names[0]


def write_sentence_transformers_files(folder: Path, config: RunConfig) -> None:
    """Write what sentence-transformers needs besides a model and its tokenizer to a folder."""
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(_MODULES.items())
    ]
    mode = _POOLING_MODES[config.training.pooling]
    pooling = {
        "word_embedding_dimension": config.model.hidden_size,
        "pooling_mode_mean_tokens": False,
        f"pooling_mode_{mode}": True,
    }
    length = {"max_seq_length": config.model.sequence_length, "do_lower_case": False}
    files: Mapping[str, Any] = {
        MODULES: modules,
        "1_Pooling/config.json": pooling,
        "2_Normalize/config.json": {},
        "sentence_bert_config.json": length,
        "config_sentence_transformers.json": {
            "prompts": _prompts(config),
            "similarity_fn_name": "cosine",
        },
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_text_atomically("the model folder", folder / name, json.dumps(content, indent=2))


def _prompts(config: RunConfig) -> dict[str, str]:
    """Texts before queries and documents, where the templates begin with one."""
    templates = {"query": config.data.prompt, "document": config.data.target}
    prefixes = {name: _PREFIX.fullmatch(text or "") for name, text in templates.items()}
    return {name: match[1] for name, match in prefixes.items() if match is not None}
