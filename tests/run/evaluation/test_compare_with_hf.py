"""`run_inference.py`: one micro-batch of validation, by us and by Hugging Face's model."""

from __future__ import annotations

import re

import huggingface_hub
import pytest
import transformers.utils
from huggingface_hub.errors import LocalEntryNotFoundError

import run.evaluation.compare_with_hf
import run_inference
from config.gptj import GPTJConfig
from config.presets import load_config
from config.t5 import T5Config
from huggingface.model_folders import write_hf_directory
from modelling.model_family import get_family
from run.evaluation.compare_with_hf import AnswerComparison, GeneratedText, HfComparison
from tests.slow import slow

SMALL = {
    "gptj_tiny": (GPTJConfig, {"layers": 1}),
    "tiny": (T5Config, {"layers": 1, "hidden_size": 32, "d_ff": 32}),
}


def run_small(preset, folder, *arguments):
    """Save a small model for Hugging Face, and run the script with it."""
    config_class, model = SMALL[preset]
    config = load_config(config_class, "inference", preset, {"model": model})
    weights = get_family(config).weight_map(config).init_weights(3)
    write_hf_directory(folder, weights, get_family(config).to_config_json(config))
    flags = [f"--{name}={value}" for name, value in model.items()]
    common = ["--config", preset, "--device", "cpu", "--load", str(folder), *flags]
    more = ["--generation.max_tokens", "4"]  # answers of random weights differ late
    return run_inference.main([*common, "--micro_batch_size", "3", *more, *arguments])


@pytest.mark.parametrize("preset", ["gptj_tiny", slow("tiny")])
def test_answers_agree_with_hugging_faces(preset, tmp_path, capsys):
    assert run_small(preset, tmp_path) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "the tokens agree for 3 of 3 prompts"
    answers = [line for line in out.splitlines() if line.startswith("ours:")]
    assert len(answers) == out.count("prompt: ") == 3
    assert len(set(answers)) > 1


def test_what_4_bits_change_is_seen_beside_whole_weights(tmp_path, capsys):
    assert run_small("gptj_tiny", tmp_path, "--quantization=int4") == 0
    assert re.search(r"the tokens agree for [0-2] of 3 prompts$", capsys.readouterr().out.strip())


def test_the_default_weights_need_a_network(monkeypatch, capsys):
    def offline(name: str, **_: object) -> str:
        raise LocalEntryNotFoundError(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    preset = ["--config", "gptj_6B_1024_pod64", "--layers", "1", "--hidden_size", "1024"]
    assert run_inference.main(preset) == 2
    said = capsys.readouterr().err.strip()
    assert "Graphcore/gptj-mnli" in said
    assert "connect to the network" in said
    assert len(said.splitlines()) == 1


def test_a_difference_is_said():
    same, other = GeneratedText([5, 1], " yes"), GeneratedText([6, 1], " no")
    text = HfComparison(
        [AnswerComparison("a", "yes", same, same), AnswerComparison("b", "yes", same, other)]
    ).text()
    assert text.count("they differ") == 1
    assert text.endswith("the tokens agree for 1 of 2 prompts")


def test_without_torch_it_generates_and_says_what_a_comparison_needs(tmp_path, monkeypatch, capsys):
    assert run_small("gptj_tiny", tmp_path / "one") == 0
    compared = capsys.readouterr().out.splitlines()
    monkeypatch.setattr(transformers.utils, "is_torch_available", lambda: False)
    assert run_small("gptj_tiny", tmp_path / "other") == 0
    alone = capsys.readouterr().out.splitlines()
    *without, last = (line for line in compared if not line.startswith("Hugging Face:"))
    assert last == "the tokens agree for 3 of 3 prompts"
    assert alone[:-1] == without
    assert "torch, which is not installed: pip install" in alone[-1]


class Stopped(Exception):
    """Where a test has seen enough."""


@pytest.mark.parametrize(
    ("arguments", "load", "micro_batch"),
    [
        ([], "Graphcore/gptj-mnli", 16),
        (["--micro_batch_size", "4"], "Graphcore/gptj-mnli", 4),
        (["--load", "random"], "random", 16),
        (["--config", "gptj_6B_gpu_fp8"], "Graphcore/gptj-mnli", 16),
        (["--config", "gptj_6B_1024_pod16"], "Graphcore/gptj-mnli", 16),
        (["--config", "gptj_tiny"], None, 64),
    ],
)
def test_alone_it_takes_the_weights_and_the_micro_batch_of_the_document(
    arguments, load, micro_batch, monkeypatch
):
    def seen(config, *_):
        assert (config.checkpoint.load, config.execution.micro_batch_size) == (load, micro_batch)
        assert config.family == "gptj"
        assert not config.fp8.enabled or config.fp8.recipe == "current", "the hub has no scales"
        raise Stopped

    monkeypatch.setattr(run.evaluation.compare_with_hf, "compare_with_hf", seen)
    with pytest.raises(Stopped):
        run_inference.main(arguments)
