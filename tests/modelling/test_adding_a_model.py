"""docs/adding_a_model.md names the right files, and a toy family that follows it trains."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import finetuning
from modelling.spec import ModelFamily
from modelling.weights import Row, Weight, WeightTable
from tests.modelling.phases.toy import WIDTH, ToyLayout, toy_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding_a_model.md").read_text("utf-8")
SAMPLES = 8


def test_the_page_names_every_file_and_no_other():
    named = set(re.findall(r"`([\w/.]+/[\w]+\.(?:py|yml))`", PAGE))
    assert {path for path in named if not (ROOT / path).is_file()} == set()
    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "modelling/gptj").glob("*.py")}
    assert own <= named


def test_the_page_names_every_field_of_the_record():
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == [
        f.name for f in fields(ModelFamily)
    ]


# ---- a toy family -------------------------------------------------------------------------------
def toy_weights(config) -> WeightTable:
    """Three layers' weights, and the scale that they share, which the first one owns."""
    rows = {f"layer.{i}": (Row("w", (Weight(f"h.{i}.w", (WIDTH, WIDTH), 0.3),)),) for i in range(3)}
    rows["layer.0"] += (Row("scale", (Weight("scale", (WIDTH,)),)),)
    phases = {"first": ("layer.0",), "rest": ("layer.1", "layer.2")}
    return WeightTable(rows, phases, config.execution.tensor_parallel)


def unused(*_: object) -> None:
    raise AssertionError("training alone does not need it")


TOY = ModelFamily(
    layout=ToyLayout,
    generator=unused,
    weights=toy_weights,
    hf_config=unused,
    tokenizer=unused,
    encode=unused,
    prompts=unused,
    generate=unused,
    training_inputs=dict,
    target_tokens=lambda batch: len(batch["x"]),
)


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1)])
def test_a_toy_family_trains(dp, tp, monkeypatch):
    """The session of the scripts, with nothing changed but the record."""
    monkeypatch.setattr(finetuning, "family_of", lambda config: TOY)
    config = toy_config(dp, tp, 2, SAMPLES)
    weights = dict(toy_weights(config).initial(0))
    x, y = np.random.default_rng(0).standard_normal((2, SAMPLES, WIDTH)).astype(np.float32)
    model = finetuning.FineTuning(config)
    model.write(weights)
    with model:
        results = [model.run([{"x": x, "y": y}], [1e-2], i)[0] for i in range(5)]
    trained = model.read(optimizer=False)
    h = x
    for i in range(3):
        h = h + np.tanh(h @ weights[f"h.{i}.w"]) * weights["scale"]
    assert results[0].loss == pytest.approx(((h - y) ** 2).sum() / SAMPLES, rel=1e-5)
    assert results[-1].loss < results[0].loss
    assert trained.keys() == weights.keys()
    assert all(not np.array_equal(trained[name], weights[name]) for name in weights)
