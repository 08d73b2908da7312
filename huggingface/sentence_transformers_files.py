"""Files that make a model folder one that sentence-transformers loads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config.sections import RunConfig
from files.atomic_writing import write_text_atomically

_MODULES = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
"""Class of each module of sentence-transformers by the folder of its files."""
_POOLING_MODES = {"mean": "mean_tokens", "last": "lasttoken", "eos": "lasttoken"}
_PREFIX = re.compile(r"([^{}]+)\{[^{}]+\}")
"""A template that is a text and then a column."""


def embedding_fields(config: RunConfig, hf_config: dict[str, Any]) -> dict[str, Any]:
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
        "modules.json": modules,
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
