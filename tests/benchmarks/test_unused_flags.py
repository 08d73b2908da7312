"""`finetuning.py` and `inference.py` refuse flags that they do not use."""

from __future__ import annotations

import json

import pytest

import finetuning
import inference
from benchmarks import compile as compile_benchmark
from benchmarks import vs_huggingface
from config.base import config_fields
from config.flags import shortest_flag
from config.gptj import GPTJConfig
from huggingface.model_folders import write_hf_directory
from modelling.model_family import get_family
from run import generation_throughput, training_throughput
from tests.modelling.gptj.hf import small_config
from tests.modelling.test_options_in_programs import OPTIONS, UNSEEN

BENCHMARKS = {"T": training_throughput, "R": generation_throughput}
MEASURED = {
    "T": {
        *("model.seed", "model.initializer_range", "model.max_position_embeddings", "adapter.load"),
        *("training.stochastic_rounding", "execution.placement", "execution.resident_layers"),
        *("execution.io_tiles", "execution.available_memory_proportion", "execution.disk"),
        *("model.eos_token_id", "model.pad_token_id", "model.quantization_group_size"),
    },
    "R": {
        *("model.seed", "model.initializer_range", "model.max_position_embeddings", "adapter.load"),
        *("execution.io_tiles", "execution.available_memory_proportion", "execution.disk"),
        *("execution.rts_activations", "execution.rts_weights_threshold"),
        *("generation.weights", "generation.seed"),
    },
}
"""Options of weights, prompts, placements and kernels."""


def options_that_change(kinds: str) -> set[str]:
    """Returns the options that change a program of one of these kinds."""
    rows = [row for _, cases in OPTIONS.values() for row in cases.items()]
    return {name for name, (_, programs) in rows if set(programs) & {*kinds}}


@pytest.mark.parametrize("kind", BENCHMARKS)
def test_what_changes_nothing_is_refused_and_nothing_else(kind: str) -> None:
    used = options_that_change("T" if kind == "T" else "RS") | MEASURED[kind]
    known = {name for _, cases in OPTIONS.values() for name in cases} | UNSEEN.keys()
    accepted = {name for name in known if name not in BENCHMARKS[kind].UNUSED}
    objectives = {f"training.{name}" for name in (
        *("beta", "gamma", "epsilon", "epsilon_high"),
        *("top_k", "temperature", "distill_weight", "distill_rest"),
    )}  # fmt: skip
    of_state = {
        "fp8.amax_compute_algo",
        "fp8.amax_history_len",
        "fp8.interval",
    }  # of training, with its model
    assert accepted - of_state == used - objectives - of_state


@pytest.mark.parametrize("main", [finetuning.main, inference.main, compile_benchmark.main])
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--data.train", "rows.jsonl"], "--data.train: "),
        (["--save=runs/x", "--checkpoint.steps", "3"], "--save, --checkpoint.steps: "),
        (["--config", "tiny", "--epochs", "2"], "--epochs: "),
        (["--training.optimizer.learning-rate.maximum", "1"], "learning-rate.maximum: "),
        (["--eval.steps", "2", "--load", "/nonexistent"], "--eval.steps: "),
    ],
)
def test_flags_of_other_scripts_are_refused_by_name(main, arguments, named, capsys) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{named}not used here, since it measures" in line


@pytest.mark.parametrize("flag", ["--load", "--data.train", "--save", "--generation.top_k"])
def test_so_does_the_comparison_with_hugging_face(flag: str, capsys) -> None:
    """It takes presets alone."""
    assert vs_huggingface.main([flag, "3"]) == 2
    assert f"{flag}: not used here, since it compares presets" in capsys.readouterr().err


@pytest.mark.parametrize("main", [finetuning.main, inference.main])
def test_what_is_loaded_must_be_there(main, capsys) -> None:
    assert main(["--load", "/nonexistent"]) == 2
    assert "/nonexistent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "unused"),
    [
        (finetuning.main, training_throughput.UNUSED),
        (inference.main, generation_throughput.UNUSED),
    ],
)
def test_help_shows_what_is_used_and_what_is_measured_alone(main, unused, capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help-all"])
    text = capsys.readouterr().out
    assert "(default: the run that --load names, else xxl_pod64)" in " ".join(text.split())
    for leaf in config_fields(GPTJConfig):
        if leaf.path in unused:
            assert f"--{shortest_flag(leaf.path)} " not in text


def test_load_measures_a_model_of_hugging_face_too(tmp_path) -> None:
    config = small_config()
    weights = get_family(config).weight_map(config).init_weights(3)
    write_hf_directory(tmp_path / "hf", weights, get_family(config).to_config_json(config))
    path = tmp_path / "plan.json"
    named = ["--load", str(tmp_path / "hf"), "--machine", "laptop", "--plan-json", str(path)]
    assert finetuning.main(named) == 0
    assert json.loads(path.read_text())["parameters"] == sum(w.size for w in weights.values())
