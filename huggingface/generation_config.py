"""Reading and writing of generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from files.errors import FileError
from files.json_files import read_json_object

GENERATION_CONFIG = "generation_config.json"
DECODER_TOKENS = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
"""Fields of an encoder-decoder's start token and forced tokens."""
TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", *DECODER_TOKENS)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Content of a folder's generation_config.json; empty if it cannot be read."""
    try:
        return read_json_object(folder / GENERATION_CONFIG).data
    except (FileError, OSError):
        return {}


def make_generation_config(base: Mapping[str, Any], hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Generation config of an exported model: that of its base model with updated token ids.

    Args:
        base: settings of the model that training began with.
        hf_config: the config.json of the export.
    """
    model_tokens = {name: hf_config[name] for name in TOKEN_FIELDS if name in hf_config}
    eos_token_ids = list(
        dict.fromkeys([*read_eos_token_ids(model_tokens), *read_eos_token_ids(base)])
    )
    if eos_token_ids:
        model_tokens["eos_token_id"] = eos_token_ids if len(eos_token_ids) > 1 else eos_token_ids[0]
    return {**base, **model_tokens}


def read_eos_token_ids(settings: Mapping[str, Any]) -> list[int]:
    """End token ids in `eos_token_id`, an int or a list; invalid ids are dropped."""
    eos_token_id = settings.get("eos_token_id")
    token_ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    return [token for token in token_ids if type(token) is int and token >= 0]
