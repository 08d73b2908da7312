"""Reading and writing of generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from files.errors import FileError
from files.json_files import read_object

GENERATION_CONFIG = "generation_config.json"
DECODER_TOKENS = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
"""Fields of an encoder-decoder's start token and forced tokens."""
TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", *DECODER_TOKENS)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Content of a folder's generation_config.json; empty if it cannot be read."""
    try:
        return read_object(folder / GENERATION_CONFIG).data
    except (FileError, OSError):
        return {}


def make_generation_config(base: Mapping[str, Any], hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Generation settings of an export: the base model's, with the trained model's tokens.

    Args:
        base: settings of the model that training began with.
        hf_config: the config.json of the export.
    """
    own = {name: hf_config[name] for name in TOKEN_FIELDS if name in hf_config}
    ends = list(dict.fromkeys([*read_eos_token_ids(own), *read_eos_token_ids(base)]))
    if ends:
        own["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return {**base, **own}


def read_eos_token_ids(settings: Mapping[str, Any]) -> list[int]:
    """End tokens in `eos_token_id`, which may be an int or a list; invalid ones are dropped."""
    named = settings.get("eos_token_id")
    listed = named if isinstance(named, list) else [named]
    return [token for token in listed if type(token) is int and token >= 0]
