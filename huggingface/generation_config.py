"""generation_config.json: how transformers and vLLM let a model write where nobody says it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from files.errors import FileError
from files.json_files import read_object

GENERATION = "generation_config.json"
TOKENS = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id")


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
    listed = (_listed(settings.get("eos_token_id")) for settings in (own, base))
    ends = list(dict.fromkeys(token for tokens in listed for token in tokens))
    if ends:
        own["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return {**base, **own}


def _listed(tokens: Any) -> list[Any]:
    if tokens is None:
        return []
    return tokens if isinstance(tokens, list) else [tokens]
