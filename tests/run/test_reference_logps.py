"""Runs of preferences: their reference, which is computed once, and what they tell."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml

import run_finetuning
import run_validation
from checkpoints import load_checkpoint
from config.t5 import T5Config
from data.pipeline import Pipeline
from data.preference_samples import PreferenceSamples
from data.samples import Samples
from data.seq2seq import SEQ2SEQ
from run.frozen_outputs import FrozenModel
from run.frozen_outputs_file import read_complete_file
from run.records.metrics_jsonl import read_metrics
from run.reference_logps import PAIR_LOGPS, ReferenceLogps
from sessions.loss_evaluation import LossSession
from tests import small_runs
from tests.full_disk import full_disk
from tests.modelling.preferences import t5_logps
from tests.run.frozen_model_runs import (
    check_equal,
    evaluated_each_second_step,
    train_on,
    weights_of,
    write_20_rows,
)
from tests.slow import slow
from tests.small_runs import (
    GPTJ,
    MODEL,
    RATE,
    TRAINING,
    finetuning,
    random_model,
)

DPO = ("--training.objective", "dpo", "--dropout_prob", "0", "--training.beta", "0.5")


pytestmark = pytest.mark.usefixtures("few")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Hugging Face's form."""
    return random_model(tmp_path_factory.mktemp("model") / "base", *MODEL)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 pairs."""
    file = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    return write_20_rows(file, chosen="the {}", rejected="a {}")


def train(folder: Path, base: Path, rows: Path, *arguments: str) -> int:
    return train_on(folder, rows, base, *DPO, *arguments)


@pytest.fixture(scope="module")
def run(base: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, evaluated at each second one."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert train(folder, base, rows, *evaluated_each_second_step("rewards/margins")) == 0
    return folder


@pytest.fixture(scope="module")
def adapted(base: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with adapters, from a model by a path relative to the working folder."""
    folder = tmp_path_factory.mktemp("runs") / "adapted"
    adapter = ("--adapter.rank", "2", "--adapter.targets", "q", "v", "--steps", "2")
    assert train(folder, Path(os.path.relpath(base)), rows, *adapter) == 0
    return folder


def files_in(folder: Path) -> dict[str, np.ndarray]:
    """The log-probabilities of the 20 pairs in a run's folder, by the name of the file."""
    found = {}
    for path in sorted((folder / "reference").iterdir()):
        file = read_complete_file(path, np.arange(21), PAIR_LOGPS, "the reference")
        assert file is not None
        with file:
            found[path.name] = file.rows(range(20))["ref_logps"]
    return found


@pytest.fixture
def samples(run: Path, rows: Path) -> Samples:
    """The run's samples."""
    config = T5Config.from_dict(yaml.safe_load((run / "config.yml").read_text()))
    data = Pipeline(config, SEQ2SEQ)
    return data.make_samples(data.read_tokenized_corpus("train"))


def check_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    """As `check_equal`, where programs may differ."""
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], rtol=1e-5, err_msg=name)


def test_the_reference_is_what_transformers_says(run: Path, base: Path, samples: Samples) -> None:
    (logps,) = files_in(run).values()  # the same samples are trained and evaluated
    assert isinstance(samples, PreferenceSamples)
    model = transformers.T5ForConditionalGeneration.from_pretrained(base).eval()
    batch = {n: torch.tensor(x).long() for n, x in samples.take(np.arange(len(samples))).items()}
    with torch.no_grad():
        expected = t5_logps(model)(batch).numpy()
    np.testing.assert_allclose(logps.reshape(-1, 2), expected, rtol=1e-4)


@pytest.mark.parametrize("recipe", ["current", slow("delayed")])
def test_an_fp8_run_has_a_reference_in_fp8(recipe, run, base, rows, tmp_path) -> None:
    """Of current scales: those that follow from steps are never learned for frozen weights."""
    fp8 = ("--fp8.enabled", "true", "--fp8.recipe", recipe, "--steps", "2")
    shutil.copytree(run / "reference", tmp_path / "reference")
    there = ("--training.reference_cache", str(tmp_path / "reference"))
    assert train(tmp_path / "run", base, rows, *fp8, *there) == 0
    first, *_ = read_metrics(tmp_path / "run/metrics.jsonl")
    exactly = recipe == "current"  # the first step of the other scales by 1
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6 if exactly else 0.1)
    known = files_in(run)
    made = {name: logps for name, logps in files_in(tmp_path).items() if name not in known}
    (logps,) = made.values()
    (wide,) = known.values()
    np.testing.assert_allclose(logps, wide, rtol=0.05)
    assert not np.allclose(logps, wide, rtol=1e-4)


def test_a_run_begins_at_its_reference_and_tells_of_rewards(run: Path) -> None:
    first, *_, last = read_metrics(run / "metrics.jsonl")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert last["rewards/margins"] > 0
    told = {"rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen",
            "logps/rejected"}  # fmt: skip
    assert told < first.keys()
    assert {f"eval_{name}" for name in told} < last.keys()
    assert last["eval_rewards/margins"] == pytest.approx(
        last["eval_rewards/chosen"] - last["eval_rewards/rejected"]
    )
    assert load_checkpoint(run / "best").step == 4


def test_a_pass_that_was_killed_goes_on(run, base, rows, tmp_path, monkeypatch) -> None:
    texts, done = LossSession.loss_stats, []

    def killed(model: LossSession, samples: Samples, first: int = 0) -> Iterator[Any]:
        for part in texts(model, samples, first):
            yield part
            done.append(part[0].start)
            if len(done) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(LossSession, "loss_stats", killed)
    assert train(tmp_path / "run", base, rows, "--steps", "4") == 128 + signal.SIGINT
    (draft,) = (tmp_path / "run/reference").iterdir()
    stale = draft.with_name("0" * 64 + draft.suffix)  # of other samples
    stale.write_bytes(draft.read_bytes())
    assert train(tmp_path / "run", base, rows, "--steps", "4") == 0
    assert done == [0, 8, 16], "no batch is computed twice"
    check_equal(files_in(tmp_path / "run"), files_in(run))
    check_equal(weights_of(tmp_path / "run"), weights_of(run))


def test_a_full_disk_ends_no_run_that_needs_a_reference(
    run, base, rows, tmp_path, monkeypatch, capsys
) -> None:
    extend_samples = ReferenceLogps.extend_samples

    def on_full_disk(*given: Any) -> Any:
        with full_disk(10):
            return extend_samples(*given)

    monkeypatch.setattr(ReferenceLogps, "extend_samples", on_full_disk)
    assert train(tmp_path / "run", base, rows, "--steps", "4") == 0
    said = capsys.readouterr().err
    assert "File too large: a run that is broken off computes the reference again" in said
    check_equal(weights_of(tmp_path / "run"), weights_of(run))


@pytest.mark.parametrize("is_first", [True, False])
def test_each_process_says_that_the_reference_is_not_finite(
    is_first, base, rows, tmp_path, monkeypatch, capsys
) -> None:
    texts, begun = LossSession.loss_stats, []

    def infinite(*given: Any) -> Iterator[Any]:
        begun.append(True)
        return ((part, logps - np.inf) for part, logps in texts(*given))

    monkeypatch.setattr(LossSession, "loss_stats", infinite)
    # The draft is the first process's in any case.
    monkeypatch.setattr("run.frozen_outputs.is_first_process", lambda: is_first or not begun)
    assert train(tmp_path / "run", base, rows, "--steps", "4") == 2
    assert "a value of the reference is not finite" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_against_its_reference(run, base, rows, tmp_path) -> None:
    assert train(tmp_path / "run", base, rows, "--steps", "2") == 0
    assert train(tmp_path / "run", base, rows, "--steps", "4") == 0
    check_equal(weights_of(tmp_path / "run"), weights_of(run))


@pytest.fixture
def nothing_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise AssertionError("the reference is computed again")

    monkeypatch.setattr(FrozenModel, "_compute", fails)


@pytest.mark.slow
def test_other_runs_of_the_same_use_it_again(run, base, rows, tmp_path, nothing_computed) -> None:
    """One with adapters too: without them it is that model."""
    there = ("--training.reference_cache", str(run / "reference"), "--steps", "2")
    assert train(tmp_path / "again", base, rows, *there) == 0
    adapter = ("--adapter.rank", "2", "--adapter.targets", "q", "v")
    assert train(tmp_path / "adapter", base, rows, *there, *adapter) == 0
    (first, *_) = read_metrics(tmp_path / "adapter/metrics.jsonl")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    with pytest.raises(AssertionError, match="computed again"):
        train(tmp_path / "other", base, rows, *there, "--data.prompt", "So {prompt}")


def test_adapters_are_off_in_the_reference(run: Path, adapted: Path) -> None:
    check_equal(files_in(adapted), files_in(run))


@pytest.mark.slow
def test_a_damaged_file_is_computed_again(run, base, rows, tmp_path, capsys) -> None:
    assert train(tmp_path / "run", base, rows, "--steps", "2") == 0
    (path,) = (tmp_path / "run/reference").iterdir()
    content = bytearray(path.read_bytes())
    content[-3] ^= 64
    path.write_bytes(content)
    there = ("--training.reference_cache", str(path.parent), "--steps", "2")
    assert train(tmp_path / "other", base, rows, *there) == 0
    assert "cannot be used: it is damaged" in capsys.readouterr().err
    check_equal(files_in(tmp_path / "run"), files_in(run))


@pytest.mark.slow
def test_a_reference_that_is_gone_is_computed_from_where_the_run_began(
    run: Path, base: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "base"
    shutil.copytree(base, mine)
    assert train(tmp_path / "run", mine, rows, "--steps", "2") == 0
    (path,) = (tmp_path / "run/reference").iterdir()
    path.unlink()
    assert train(tmp_path / "run", mine, rows, "--steps", "4") == 0
    check_equal(weights_of(tmp_path / "run"), weights_of(run))
    check_equal(files_in(tmp_path / "run"), files_in(run))
    path.unlink()
    shutil.rmtree(mine)
    assert train(tmp_path / "run", mine, rows, "--steps", "6") == 2
    assert "does not hold the model that the run began with" in capsys.readouterr().err


# ---- validation of runs that were not evaluated -------------------------------------------------
def train_from(kind: str, folder: Path, run: Path, base: Path, rows: Path) -> None:
    """Train without evaluation from a model by a path relative to the working folder; from random
    weights; from a run's weights; or resume a run in another folder."""
    load, flags = {
        "model": (os.path.relpath(base), ()),
        "random": ("random", ()),
        "weights": (str(run), ("--checkpoint.load_optimizer", "false")),
        "resumed": (str(run), ("--steps", "6", "--seed", "0")),  # the seed is in the file's name
    }[kind]
    assert train(folder, Path(load), rows, "--steps", "2", *flags) == 0


def check_validated_without_reference(folder: Path, where: Path, patch: pytest.MonkeyPatch) -> None:
    """Check that the validation of a run, in a working folder, computes the reference anew."""
    trained = files_in(folder)  # by the weights that the run began with, of the same samples
    shutil.rmtree(folder / "reference")
    patch.chdir(where)
    assert run_validation.main(["--load", str(folder)]) == 0
    check_close(files_in(folder), trained)


def test_validation_computes_the_reference_of_adapters(
    adapted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(adapted, tmp_path / "run"))
    check_validated_without_reference(folder, tmp_path, monkeypatch)


@pytest.mark.parametrize("kind", [slow("model"), slow("random"), slow("weights"), "resumed"])
def test_validation_computes_a_reference_that_training_did_not_leave(
    kind: str, run: Path, base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    train_from(kind, folder, run, base, rows)
    check_validated_without_reference(folder, tmp_path, monkeypatch)


def test_a_model_that_was_moved_is_named(run, base, rows, tmp_path, capsys) -> None:
    mine, folder = tmp_path / "base", tmp_path / "run"
    shutil.copytree(base, mine)
    assert train(folder, mine, rows, "--steps", "2") == 0
    shutil.rmtree(folder / "reference")
    mine.rename(tmp_path / "moved")
    assert run_validation.main(["--load", str(folder)]) == 2
    assert "base does not hold the model that the run began with" in capsys.readouterr().err
    moved = ("--checkpoint.base_model", str(tmp_path / "moved"))
    assert run_validation.main(["--load", str(folder), *moved]) == 0
    check_close(files_in(folder), files_in(run))


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["ipo", "hinge", "kto"])
def test_each_objective_with_a_reference_is_validated(
    objective: str, base: Path, rows: Path, tmp_path: Path
) -> None:
    command = ("--training.objective", objective, "--steps", "2")
    assert train(tmp_path / "run", base, rows, *command) == 0
    shutil.rmtree(tmp_path / "run/reference")
    assert run_validation.main(["--load", str(tmp_path / "run")]) == 0


def test_a_run_that_goes_on_elsewhere_takes_its_reference_along(
    run: Path, base: Path, rows: Path, tmp_path: Path, nothing_computed: None
) -> None:
    data = ("--data.train", str(rows), "--data.validation", str(rows), *DPO)
    command = (*TRAINING, *data, "--load", str(run), "--steps", "6")
    assert small_runs.train(tmp_path / "other", *command) == 0
    check_equal(files_in(tmp_path / "other"), files_in(run))


def test_rewards_are_those_of_transformers_log_probabilities(
    run: Path, base: Path, samples: Samples
) -> None:
    """Of the last evaluation, by the weights of the last step."""
    model = transformers.T5ForConditionalGeneration.from_pretrained(base).eval()
    trained = {n: torch.tensor(x) for n, x in weights_of(run).items() if "/" not in n}
    assert not model.load_state_dict(trained, strict=False).unexpected_keys
    batch = {n: torch.tensor(x).long() for n, x in samples.take(np.arange(len(samples))).items()}
    with torch.no_grad():
        logps = t5_logps(model)(batch).numpy()
    (reference,) = files_in(run).values()
    rewards = 0.5 * (logps - reference.reshape(-1, 2))
    *_, last = read_metrics(run / "metrics.jsonl")
    for at, name in enumerate(("chosen", "rejected")):
        assert last[f"eval_logps/{name}"] == pytest.approx(logps[:, at].mean(), rel=1e-4)
        told = last[f"eval_rewards/{name}"]
        assert told == pytest.approx(rewards[:, at].mean(), rel=1e-3)
    assert last["eval_rewards/accuracies"] == np.mean(rewards[:, 0] > rewards[:, 1])


def test_validation_compares_with_the_runs_reference(run, base, rows, tmp_path, capsys) -> None:
    assert run_validation.main(["--load", str(run), "--out", str(tmp_path / "out")]) == 0
    *_, last = read_metrics(run / "metrics.jsonl")
    found = json.loads((tmp_path / "out/eval.json").read_text())
    for name in ("loss", "rewards/margins", "rewards/accuracies", "logps/rejected"):
        assert found[name] == pytest.approx(last[f"eval_{name}"], rel=1e-5)
    data = ("--data.validation", str(rows), *DPO)
    assert run_validation.main([*MODEL, "--load", str(base), *data]) == 2
    assert "which only a run of run_finetuning.py has" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--training.objective", "ipo", "--training.label_smoothing", "0.1"), "label_smoothing"),
        (("--training.objective", "dop"), "dpo"),
        (("--training.objective", "dpo", "--checkpoint.keep_best", "bleu",
          "--eval.steps", "2"), "bleu does not suit"),
        (("--training.objective", "kto", "--training.beta", "0"), "training.beta"),
        (("--training.objective", "orpo", "--training.gamma", "1"), "training.gamma is for simpo"),
        (("--training.objective", "cross_entropy", "--training.beta", "1"), "training.beta is for"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_said(base, rows, tmp_path, capsys, arguments, said) -> None:
    data = ("--data.train", str(rows), "--data.validation", str(rows), "--load", str(base))
    command = [*TRAINING, *data, *arguments, "--steps", "2", "--run-dir", str(tmp_path / "run")]
    assert run_finetuning.main(command) == 2
    assert said in capsys.readouterr().err


def test_packing_is_refused(rows, capsys) -> None:
    command = ["--config", "gptj_tiny", "--training.objective", "dpo", "--data.packing", "true"]
    assert run_finetuning.main([*command, "--data.train", str(rows)]) == 2
    assert "data.packing false" in capsys.readouterr().err


# ---- in any way of running ----------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        ("--device_iterations", "2"),
        ("--resident_layers", "4"),
        ("--activations", "keep"),
        ("--execution.update", "deferred"),
        ("--execution.disk", "disk", "--execution.placement", "host"),
    ],
)
def test_executions_train_and_tell_alike(way, run, base, rows, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert train(tmp_path / "run", base, rows, "--steps", "4", *way) == 0
    check_equal(weights_of(tmp_path / "run"), weights_of(run))
    told = zip(*(read_metrics(f / "metrics.jsonl") for f in (run, tmp_path / "run")), strict=True)
    for one, other in told:
        names = [name for name in one if name.startswith(("loss", "rewards/", "logps/"))]
        assert len(names) == 7
        assert [other[name] for name in names] == [one[name] for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_processes_tell_of_the_whole_batch(objective: str, rows: Path, tmp_path: Path) -> None:
    """The reference is computed, shared and continued in one folder."""
    flags = [*GPTJ, *RATE, "--training.objective", objective, "--data.packing", "false",
             "--data.separator", "", "--examples_per_sample", "2", "--sequence_length", "48",
             "--data.train", str(rows), "--data.validation", str(rows),
             "--eval.steps", "2"]  # fmt: skip
    found = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        for steps in ("2", "4"):
            for one in finetuning(processes, tmp_path / "executables", *flags, "--steps", steps,
                                  "--save", str(folder)):  # fmt: skip
                said = one.communicate(timeout=300)[1]
                assert one.returncode == 0, said
        found.append(read_metrics(folder / "metrics.jsonl"))
    for one, other in zip(*found, strict=True):
        for name in one:
            if name.startswith(("loss", "rewards/", "logps/", "kl", "eval_")):
                assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name
