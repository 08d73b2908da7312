"""generation_config.json: how transformers and vLLM let a model write where nobody says it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from files.errors import FileError
from files.json_files import read_object

GENERATION = "generation_config.json"
OF_DECODER = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
"""The decoder's start token and forced tokens of an encoder-decoder."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", *OF_DECODER)


def generation_settings(folder: Path) -> dict[str, Any]:
    """What the file in a folder says; nothing where there is none that can be read."""
    try:
        return read_object(folder / GENERATION).data
    except (FileError, OSError):
        return {}


def exported_settings(base: Mapping[str, Any], description: Mapping[str, Any]) -> dict[str, Any]:
    """Those of an export: the base's, with the tokens of the model that was trained.

    Args:
        base: settings of the model that training began with.
        description: the config.json of the export.
    """
    own = {name: description[name] for name in TOKENS if name in description}
    ends = list(dict.fromkeys([*end_tokens(own), *end_tokens(base)]))
    if ends:
        own["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return {**base, **own}


def end_tokens(settings: Mapping[str, Any]) -> list[int]:
    """The tokens that end a text, as far as they are tokens."""
    named = settings.get("eos_token_id")
    listed = named if isinstance(named, list) else [named]
    return [token for token in listed if type(token) is int and token >= 0]
