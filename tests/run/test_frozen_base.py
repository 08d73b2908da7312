"""Checkpoints of runs that train some weights: they hold these, and name the model that has the
others."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import run_export
import run_generation
import run_validation
from checkpoints import load_checkpoint
from run.records.metrics_jsonl import read_metrics
from tests import small_runs
from tests.small_runs import BATCH, RATE, random_model

MODEL = ("--config", "gptj_tiny", "--layers", "2", "--hidden_size", "32", "--heads", "4")
TRAINING = (*MODEL, *BATCH, *RATE, "--dropout_prob", "0.1")
NORMS = ("--training.trainable", "head.norm", "*ln_1", "--training.frozen", "layer.0")
TRAINED = {f"transformer.{n}.{p}" for n in ("ln_f", "h.1.ln_1") for p in ("weight", "bias")}
WEIGHTS, WORDS = "model.safetensors", "transformer.wte.weight"


pytestmark = pytest.mark.usefixtures("few")


def train(folder: Path, *arguments: str, trained: tuple[str, ...] = NORMS) -> int:
    return small_runs.train(folder, *TRAINING, *trained, *arguments)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Hugging Face's form."""
    return random_model(tmp_path_factory.mktemp("model") / "base", *MODEL)


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, with its steps 2 and 4."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    best = ("--eval.steps", "2", "--eval.metrics", "loss")
    assert (
        train(folder, "--load", str(base), "--steps", "4", *best, "--checkpoint.keep_best", "loss")
        == 0
    )
    return folder


@pytest.fixture(scope="module")
def stopped(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A copy of the model, and a run of two steps of it."""
    folder = tmp_path_factory.mktemp("stopped")
    other = Path(shutil.copytree(base, folder / "base"))
    assert train(folder / "run", "--load", str(other), "--steps", "2") == 0
    return other, folder / "run"


@pytest.fixture
def moved(base: Path, stopped: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """A moved model, and a copy of the run that refers to it."""
    other, run = stopped
    shutil.copytree(base, other, dirs_exist_ok=True)
    return other, Path(shutil.copytree(run, tmp_path / "run"))


def test_they_hold_what_is_trained(run: Path, base: Path) -> None:
    checkpoint = load_checkpoint(run)
    names = {name.rpartition("/")[2] for name in checkpoint.tensors}
    assert names == TRAINED
    assert {n for n in checkpoint.tensors if "/" not in n} == TRAINED
    named = checkpoint.metadata["base"]
    assert named["name"] == str(base)
    assert named["sha256"].keys() == load_file(base / WEIGHTS).keys() - TRAINED
    assert set(load_checkpoint(run / "best").tensors) == TRAINED


def test_an_export_has_all(run: Path, base: Path, tmp_path: Path) -> None:
    assert run_export.main(["--load", str(run), "--save-hf", str(tmp_path / "out")]) == 0
    before, after = (load_file(folder / WEIGHTS) for folder in (base, tmp_path / "out"))
    trained = load_checkpoint(run).tensors
    assert before.keys() == after.keys()
    for name, array in after.items():
        expected = trained[name] if name in TRAINED else before[name]
        assert array.tobytes() == expected.tobytes(), name
        assert (array.tobytes() == before[name].tobytes()) == (name not in TRAINED), name


def test_the_best_is_exported_whole(run: Path, base: Path, tmp_path: Path) -> None:
    """Also by a run that has nothing left to do."""
    done = ("--load", str(base), "--steps", "4", "--save-hf", str(tmp_path / "out"))
    assert train(run, *done) == 0
    assert load_file(tmp_path / "out" / WEIGHTS).keys() == load_file(base / WEIGHTS).keys()


def test_a_run_continues_bit_for_bit(moved: tuple[Path, Path], run: Path) -> None:
    """Also without its model's name on the command line."""
    folder = moved[1]
    assert train(folder, "--load", str(folder), "--steps", "4") == 0
    found, expected = (load_checkpoint(each).tensors for each in (folder, run))
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].tobytes() == expected[name].tobytes(), name
    losses = [[r["loss"] for r in read_metrics(each / "metrics.jsonl")] for each in (folder, run)]
    assert losses[0] == losses[1]


@pytest.mark.slow  # 7 seconds on 2 cores
def test_validation_and_generation_read_both(run: Path, tmp_path: Path, capsys) -> None:
    command = ["--load", str(run), "--micro_batch_size", "8", "--eval.metrics", "loss"]
    assert run_validation.main([*command, "--eval.samples", "8"]) == 0
    whole = str(tmp_path / "out")
    assert run_export.main(["--load", str(run), "--save-hf", whole]) == 0
    capsys.readouterr()
    answers = []
    for name in (str(run), whole):
        assert run_generation.main(["--load", name, "a lamp"]) == 0
        answers.append(capsys.readouterr().out)
    assert len(answers[0]) > 3
    assert answers[1].startswith(answers[0].strip())  # the run's writes as much as labels have


def spoil(folder: Path) -> None:
    """Change one element of one weight."""
    weights = load_file(folder / WEIGHTS)
    weights[WORDS] = np.array(weights[WORDS])
    weights[WORDS][3, 5] += 0.25
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_another_model_is_refused(moved: tuple[Path, Path], base: Path, tmp_path, capsys) -> None:
    """One that has changed, that is named instead, or that is gone."""
    model, folder = moved
    spoil(model)
    refusal = f"{model} is not the model that the run in {folder} began with: {WORDS} is"
    assert train(folder, "--load", str(model), "--steps", "4") == 2
    assert refusal in told(capsys)
    assert run_export.main(["--load", str(folder), "--save-hf", str(tmp_path / "out")]) == 2
    assert refusal in told(capsys)
    # The same bits elsewhere are the same model.
    assert train(folder, "--load", str(base), "--steps", "3") == 0
    shutil.rmtree(model)
    assert run_export.main(["--load", str(folder), "--save-hf", str(tmp_path / "out")]) == 2
    assert "--checkpoint.base_model says where they are" in told(capsys)
    command = ["--load", str(folder), "--save-hf", str(tmp_path / "out")]
    assert run_export.main([*command, "--checkpoint.base_model", str(base)]) == 0


def test_other_weights_cannot_be_trained_on(run: Path, base: Path, capsys) -> None:
    """All of them, or some others."""
    for named in ("null", "*norm*"):
        trained = ("--training.trainable", named, "--training.frozen", "null")
        assert train(run, "--load", str(base), "--steps", "6", trained=trained) == 2
        assert "trains other weights than training.trainable and frozen select" in told(capsys)


@pytest.mark.slow  # 6 seconds on 2 cores
def test_a_new_run_from_one(run: Path, base: Path, tmp_path: Path) -> None:
    """Its base is the same model where that has all that it does not train, else the step."""
    new = ("--load", str(run), "--checkpoint.load_optimizer", "false", "--steps", "1")
    for patterns, expected in ((NORMS, base), (("--training.trainable", "lm_head"), run)):
        folder = tmp_path / expected.name
        assert train(folder, *new, trained=patterns) == 0
        name = load_checkpoint(folder).metadata["base"]["name"]
        assert name == str(base) if expected is base else Path(name).parent == run
        assert run_export.main(["--load", str(folder), "--save-hf", f"{folder}.out"]) == 0
    found, before = load_file(f"{folder}.out/{WEIGHTS}"), load_checkpoint(run).tensors
    for name in TRAINED:
        assert found[name].tobytes() == before[name].tobytes()


def test_random_weights_are_a_model_too(tmp_path: Path, capsys) -> None:
    assert train(tmp_path / "run", "--steps", "1") == 0
    assert load_checkpoint(tmp_path / "run").metadata["base"]["name"] == "random"
    assert train(tmp_path / "run", "--steps", "2") == 0
    out = ["--save-hf", str(tmp_path / "out")]
    assert run_export.main(["--load", str(tmp_path / "run"), *out, "--seed", "7"]) == 2
    assert "random is not the model that the run in" in told(capsys)
    assert run_export.main(["--load", str(tmp_path / "run"), *out]) == 0
