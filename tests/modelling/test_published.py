"""The config.json of published models: each is read, and written again as it was."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from config.families import FAMILIES, family_by_model_type
from config.sections import RunConfig
from files.json_files import JsonObject
from modelling.model_family import load_family
from tests.modelling.published import PUBLISHED


def read(data: dict[str, Any]) -> RunConfig:
    """The configuration of a model with random weights."""
    name = family_by_model_type()[data["model_type"]]
    model = load_family(name).from_config_json(JsonObject(data, "config.json"))
    return FAMILIES[name].config.from_dict(
        {"family": name, "model": model, "training": {"global_batch_size": 1}}
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_read_and_written(name: str, tmp_path: Path) -> None:
    count, data = PUBLISHED[name]
    config = read(data)
    family = load_family(config.family)
    weights = family.weight_map(config).weights
    assert sum(math.prod(weight.shape) for weight in weights) == count
    written = family.to_config_json(config)
    assert read(written).model == config.model
    (tmp_path / "config.json").write_text(json.dumps(written))
    loaded = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is transformers.CONFIG_MAPPING[data["model_type"]]
    assert read(loaded.to_dict()).model == config.model
