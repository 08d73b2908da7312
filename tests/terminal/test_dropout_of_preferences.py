"""Preferences are learned without dropout, unless a person asks for it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import run_finetuning
from checkpoints import CheckpointStore
from config.base import nest_by_path
from config.families import config_class_of_preset
from config.presets import load_preset, merge_over
from config.sections import RunConfig
from files.yaml_files import dump_yaml
from planning.config_loader import CONFIG_LOADER
from run.options import RunOptions
from run.records.metrics_jsonl import read_metrics
from terminal.command_line import read_command_line
from tests.huggingface.hub_folders import save
from tests.small_runs import few_examples

DPO = ("--training.objective", "dpo")


def read(*flags: str) -> RunConfig:
    line = read_command_line("", "finetuning", "tiny", flags, RunOptions.add_flags, CONFIG_LOADER)
    return line.config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A T5 whose config.json says nothing of dropout: transformers' default is 0.1."""
    folder = tmp_path_factory.mktemp("model") / "t5"
    save("t5", folder)
    return str(folder)


def saved_run(folder: Path, **fields: Any) -> str:
    data = merge_over(load_preset("finetuning", "tiny"), nest_by_path(fields))
    config = config_class_of_preset(data, "tiny").from_dict(data)
    with CheckpointStore(folder) as store:
        texts = {"config.yml": dump_yaml(config.to_dict())}
        store.save(9, {"w": np.zeros(1, np.float32)}, {}, wait=True, texts=texts)
    return str(folder)


@pytest.mark.parametrize("objective", ["dpo", "ipo", "hinge", "simpo", "orpo", "cpo", "kto"])
def test_that_of_a_model_is_turned_off_and_told(objective, model, capsys) -> None:
    assert read("--model", model).model.dropout_prob == 0.1
    assert capsys.readouterr().err == ""
    config = read("--model", model, "--training.objective", objective)
    assert config.model.dropout_prob == 0
    assert "model.dropout_prob: 0.1 -> 0: preferences" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["flag", "file", "file with the objective"])
def test_that_of_a_person_is_kept_and_told(place, model, tmp_path, capsys) -> None:
    file = tmp_path / "own.yml"
    objective = "training: {objective: kto}\n" if "objective" in place else ""
    file.write_text(f"dropout_prob: 0.2\n{objective}")
    own = ("--dropout_prob", "0.2") if place == "flag" else ("--config", str(file))
    flags = () if objective else DPO
    assert read("--model", model, *own, *flags).model.dropout_prob == 0.2
    assert "warning: model.dropout_prob is 0.2" in capsys.readouterr().err


def test_none_is_not_told(model, capsys) -> None:
    assert read("--model", model, "--dropout_prob", "0", *DPO).model.dropout_prob == 0
    assert "dropout" not in capsys.readouterr().err


def test_that_of_another_objectives_run_is_turned_off(tmp_path, capsys) -> None:
    fields = {"model.dropout_prob": 0.1, "adapter.dropout": 0.3, "adapter.rank": 2}
    run = saved_run(tmp_path / "run", **fields)
    config = read("--load", run, "--checkpoint.load_optimizer", "false", *DPO)
    assert (config.model.dropout_prob, config.adapter.dropout) == (0, 0)
    told = capsys.readouterr().err
    assert "model.dropout_prob: 0.1 -> 0" in told
    assert "adapter.dropout: 0.3 -> 0" in told


@pytest.mark.parametrize("flags", [(), DPO])
def test_a_run_of_preferences_keeps_its_own(flags, tmp_path, capsys) -> None:
    fields = {"model.dropout_prob": 0.1, "training.objective": "dpo"}
    run = saved_run(tmp_path / "run", **fields)
    assert read("--save", run, *flags).model.dropout_prob == 0.1
    assert "warning: model.dropout_prob is 0.1" in capsys.readouterr().err


def test_that_of_an_adapters_folder_is_turned_off(model, tmp_path, capsys) -> None:
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "lora_dropout": 0.05,
                "target_modules": ["q", "v"]}  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    loads = ("--model", model, "--adapter.load", str(tmp_path))
    assert read(*loads).adapter.dropout == 0.05
    assert read(*loads, *DPO).adapter.dropout == 0
    assert "adapter.dropout: 0.05 -> 0" in capsys.readouterr().err
    assert read(*loads, *DPO, "--adapter.dropout", "0.2").adapter.dropout == 0.2


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "loss"), [("dpo", math.log(2)), ("kto", 0.5)])
def test_the_first_loss_is_that_of_a_model_at_its_reference(
    objective: str, loss: float, model: str, tmp_path: Path
) -> None:
    rows = [{"prompt": f"is {i}", "chosen": "yes", "rejected": "no"} for i in range(16)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("--model", model, "--data.train", str(file), "--training.objective", objective)
    run = ("--steps", "1", "--run-dir", str(tmp_path / "run"))
    with few_examples(tmp_path / "executables"):
        assert run_finetuning.main([*command, *run]) == 0
    (first,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert first["loss"] == pytest.approx(loss, abs=1e-6)
