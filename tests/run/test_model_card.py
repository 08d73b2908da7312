"""Model cards: what the hub's library reads of them, and what they tell nobody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard as HubCard

from config.presets import load_config
from config.t5 import T5Config
from data.causal_lm import CAUSAL_LM
from data.seq2seq import SEQ2SEQ
from files.run_folder import RunFolder
from huggingface.model_card_text import AdapterInfo
from run.base_model_ref import BaseModelRef
from run.model_card import RunRecords, write_model_card
from run.options import RunOptions
from run.records.metrics_logger import MetricsLogger

COMMAND = "python3 run_finetuning.py --load google/flan-t5-small --data.train '/home/me/my set.csv'"


def record(path: Path, step: int = 4, **changes: object) -> RunRecords:
    """The record of a run of four steps that was evaluated after every other one."""
    over = {"training": {"steps": 4, "epochs": None}} | changes
    config = load_config(T5Config, "finetuning", "tiny", over)
    with MetricsLogger(
        config, RunFolder(path), RunOptions("tiny", command=COMMAND), hardware="2 × cpu"
    ) as report:
        for step_ in (1, 2, 3, 4):
            found = {"eval_loss": 2.0 / step_, "eval_accuracy": step_ / 10}
            evaluated = found if step_ % 2 == 0 else {}
            report.log_step(step_, loss=3.0 / step_, learning_rate=1e-3, **evaluated)
    return RunRecords(config.to_dict(), step, RunFolder(path))


def card(folder: Path, run: RunRecords | None, load: str | None = None) -> HubCard:
    folder.mkdir()
    write_model_card(folder, "my|model", SEQ2SEQ, load, run)
    return HubCard.load(folder / "README.md")


def test_a_card_of_a_run(tmp_path, capsys):
    data = {
        "train": "/home/me/my set.csv",
        "validation": "org/held-out:sub@test",
        "prompt": "say `{x}`: | ",
        "target": "{y}",
    }
    run = record(tmp_path / "run", data=data, checkpoint={"load": "google/flan-t5-small"})
    found = card(tmp_path / "hf", run)
    front = found.data.to_dict()
    assert front["base_model"] == "google/flan-t5-small"
    assert front["datasets"] == ["org/held-out"]
    assert front["library_name"] == "transformers"
    assert front["pipeline_tag"] == "text2text-generation"
    values = {r.metric_type: r.metric_value for r in found.data.eval_results or []}
    assert values == {"loss": 0.5, "accuracy": 0.4}
    for text in (
        "| hardware | 2 × cpu |",
        "run\\_finetuning.py --load google/flan-t5-small --data.train 'my set.csv'",
        "| training loss, last step | 0.7500 |",
        "| optimizer steps | 4 |",
        "| software | python 3.",
        "`` say `{x}`: |  ``",
        "global_batch_size: ",
        "![Loss and learning rate over the optimizer steps.](loss_curve.png)",
    ):
        assert text in found.text, text
    assert "/home" not in found.content
    assert (tmp_path / "hf" / "loss_curve.png").stat().st_size > 10_000


def test_weights_of_an_earlier_step_have_its_metrics(tmp_path):
    """And those that run_validation.py found for this step go first."""
    run = record(tmp_path / "run", step=3)
    found = card(tmp_path / "earlier", run)
    assert "| optimizer steps | 3 of 4 |" in found.text
    assert {r.metric_type: r.metric_value for r in found.data.eval_results} == {
        "loss": 1.0,
        "accuracy": 0.2,
    }
    whole = {"step": 3, "accuracy": 0.75, "errors": []}
    (tmp_path / "run" / "eval.json").write_text(json.dumps(whole))
    found = card(tmp_path / "validated", run)
    assert [r.metric_value for r in found.data.eval_results] == [0.75]
    assert found.data.base_model is None
    assert "from random weights" in found.text


@pytest.mark.parametrize("damage", ["", "{", '{"sessions": [3, {"command": 1}]}', "[]"])
def test_a_damaged_record_costs_its_part_of_the_card(tmp_path, damage):
    run = record(tmp_path / "run")
    for name in ("run.json", "eval.json"):
        (tmp_path / "run" / name).write_text(damage)
    found = card(tmp_path / "hf", run)
    assert "hardware" not in found.text
    assert len(found.data.eval_results) == 2


@pytest.mark.parametrize(
    ("base", "line"),
    [
        ("org/model", "base = 'org/model'"),
        ("../my base", "base = folder + '/../my base'"),
        (None, 'base = "..."'),
    ],
)
def test_the_card_of_an_adapter_names_its_base(tmp_path, base, line):
    write_model_card(tmp_path, "a", SEQ2SEQ, "org/model", None, AdapterInfo(base))
    found = HubCard.load(tmp_path / "README.md")
    assert line in found.text
    assert (found.data.library_name, found.data.tags) == ("peft", ["lora", "popxl-xla"])
    assert found.data.base_model == "org/model"


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("org/model", "org/model"),
        ("random", None),
        ("{}/base", "../base"),
        ("/gone/m", "{}/gone/m"),
    ],
)
def test_a_base_has_the_name_that_it_was_given(tmp_path, name, seen):
    (tmp_path / "base").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "base")
    up = "/".join([".."] * len((tmp_path / "adapter").resolve().parts[1:]))
    found = BaseModelRef.from_location(name.format(tmp_path)).name_relative_to(tmp_path / "adapter")
    assert found == (None if seen is None else seen.format(up))


def test_a_model_of_conversations_is_asked_by_its_template(tmp_path):
    run = record(tmp_path / "run", data={"format": "conversational", "system": "Be brief."})
    text = str(card(tmp_path / "hf", run))
    assert "tokenizer.apply_chat_template(" in text
    assert "| system message | Be brief. |" in text


def test_weights_of_no_run(tmp_path):
    (tmp_path / "hf").mkdir()
    write_model_card(tmp_path / "hf", "copy", CAUSAL_LM, "EleutherAI/gpt-j-6b", None)
    found = HubCard.load(tmp_path / "hf" / "README.md")
    assert found.data.base_model == "EleutherAI/gpt-j-6b"
    assert found.data.pipeline_tag == "text-generation"
    assert "Weights of EleutherAI/gpt-j-6b." in found.text
    write_model_card(tmp_path / "hf", "copy", CAUSAL_LM, str(tmp_path), None)
    found = HubCard.load(tmp_path / "hf" / "README.md")
    assert found.data.base_model is None
    assert str(tmp_path.parent) not in found.content


def test_the_settings_are_yaml_that_holds_the_configuration(tmp_path):
    run = record(tmp_path / "run")
    found = card(tmp_path / "hf", run)
    text = found.text.partition("```yaml\n")[2].partition("\n```")[0]
    settings = yaml.safe_load(text)
    assert settings["training"] == run.config["training"]
    assert "checkpoint" not in settings
