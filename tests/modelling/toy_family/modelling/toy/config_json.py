"""The config.json of the toy family, in both directions."""

from __future__ import annotations

from typing import Any

from config.toy import ToyConfig
from files.json_files import JsonObject


def to_config_json(config: ToyConfig) -> dict[str, Any]:
    return {"model_type": "toy"}


def from_config_json(hf_config: JsonObject) -> dict[str, Any]:
    return {}
