"""Runs that learn from stored rollouts: whose log-probabilities they take, and how they resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import run_export
import run_validation
from data.samples import Samples
from run.records.metrics_jsonl import read_metrics
from sessions.loss_evaluation import LossSession
from tests import small_runs
from tests.run.frozen_model_runs import (
    check_equal,
    evaluated_each_second_step,
    train_on,
    weights_of,
    write_rows,
)
from tests.slow import slow
from tests.small_runs import random_model

pytestmark = pytest.mark.usefixtures("few")

ROLLOUTS = ("--training.objective", "grpo", "--dropout_prob", "0", "--training.beta", "0.5")
ADAPTER = ("--adapter.rank", "2", "--adapter.targets", "q", "v")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model") / "base", *small_runs.MODEL)


def row(index: int) -> dict[str, Any]:
    name = ("Anna", "Ben", "Eva", "Carl")[index % 4]
    return {"prompt": f"{name} took", "completion": "a", "reward": index % 3}


def write_rollouts(file: Path, **values: Any) -> Path:
    return write_rows(file, (row(i) | values for i in range(24)))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp("data") / "rollouts.jsonl")


def train(folder: Path, base: Path, rows: Path, *arguments: str) -> int:
    return train_on(folder, rows, base, *ROLLOUTS, *arguments)


@pytest.fixture(scope="module")
def run(base: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, evaluated at each second one."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert train(folder, base, rows, *evaluated_each_second_step("loss")) == 0
    return folder


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [dict(step) for step in read_metrics(folder / "metrics.jsonl")]


def test_the_policy_begins_as_the_model_that_wrote_the_rollouts(run: Path) -> None:
    first, *_, last = metrics_of(run)
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert last["kl"] > 1e-6
    assert first["clip_ratio/region_mean"] == 0
    assert 0 <= first["reward"] <= 2
    assert first["completions/mean_length"] == first["completions/max_length"] > 1
    assert {"eval_loss", "eval_kl", "eval_reward_std", "eval_entropy"} <= last.keys()
    assert (run / "best").is_dir()
    assert len([*(run / "reference").iterdir()]) == 1, "policy and reference are one model"


@pytest.mark.parametrize("adapter", [(), slow(ADAPTER)])
def test_a_run_that_was_stopped_resumes_against_the_same(
    run, base, rows, tmp_path, adapter
) -> None:
    """Bit for bit, though the policy is another one by then."""
    whole = run
    if adapter:
        whole = tmp_path / "whole"
        assert train(whole, base, rows, "--steps", "4", *adapter) == 0
    assert train(tmp_path / "run", base, rows, "--steps", "2", *adapter) == 0
    shutil.rmtree(tmp_path / "run" / "reference")
    assert train(tmp_path / "run", base, rows, "--steps", "4", *adapter) == 0
    check_equal(weights_of(tmp_path / "run"), weights_of(whole))


@pytest.mark.slow  # test_reference_logps.py kills a pass of the same code
def test_a_pass_that_is_killed_is_resumed(run, base, rows, tmp_path, monkeypatch) -> None:
    stats = LossSession.loss_stats

    def killed(model: LossSession, samples: Samples, first: int = 0) -> Iterator[Any]:
        yield next(stats(model, samples, first))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LossSession, "loss_stats", killed)
        assert train(tmp_path / "run", base, rows, "--steps", "4") == 130
    assert train(tmp_path / "run", base, rows, "--steps", "4") == 0
    check_equal(weights_of(tmp_path / "run"), weights_of(run))


@pytest.mark.slow
def test_trained_adapters_wrote_the_rollouts_of_the_next_run(base, rows, tmp_path) -> None:
    """The loop: a run's adapter is the policy of the next, the reference stays the base model."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(first, base, rows, "--steps", "4", "--learning_rate", "0.1", *ADAPTER) == 0
    exported = tmp_path / "adapter"
    assert run_export.main(["--load", str(first), "--save-hf", str(exported)]) == 0
    load = ("--adapter.load", str(exported), "--steps", "2")
    assert train(second, base, rows, *load) == 0
    begins, *_ = metrics_of(second)
    assert begins["kl"] > 1e-4, "from the base model"
    assert begins["clip_ratio/region_mean"] == 0, "the ratio is to the adapters' own"
    assert len([*(second / "reference").iterdir()]) == 2
    shutil.rmtree(second / "reference")
    assert train(second, base, rows, *load[:2], "--steps", "4") == 0
    assert run_validation.main(["--load", str(second), "--out", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out/eval.json").read_text())["kl"] > 1e-4


def test_log_probabilities_of_rows_are_taken(base, rows, tmp_path) -> None:
    """Far from the policy, so that ratios are clipped; RLOO's reference is computed."""
    told = write_rollouts(tmp_path / "told.jsonl", logprobs=[-50.0, -50.0])
    assert train(tmp_path / "run", base, told, "--steps", "1", "--training.objective", "rloo") == 0
    (first,) = metrics_of(tmp_path / "run")
    assert 0 < first["clip_ratio/high_mean"] < 1
    assert first["clip_ratio/low_mean"] == 0
    assert first["kl"] < -10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--training.epsilon", "-1"), "training.epsilon"),
        (("--training.scale_rewards", "both"), "training.scale_rewards"),
        (("--training.max_completion_length", "5"), "max_completion_length is for dr_grpo, not"),
        (("--training.objective", "rloo", "--training.scale_rewards", "group"), "give batch or"),
        (("--training.gamma", "1"), "training.gamma is for simpo"),
        (("--training.objective", "dpo"), "preferences need prompt, chosen and rejected"),
    ],
)
def test_what_does_not_fit_is_said(base, rows, tmp_path, capsys, arguments, said) -> None:
    assert train(tmp_path / "run", base, rows, "--steps", "2", *arguments) == 2
    assert said in capsys.readouterr().err
