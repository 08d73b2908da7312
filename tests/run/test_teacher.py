"""Runs that distil a teacher: its outputs are stored once, and what does not fit is named."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import run_export
import run_finetuning
import run_validation
from checkpoints import load_checkpoint, safetensors_files
from data.samples import Samples
from run import known_digests
from run.frozen_outputs import FrozenModel
from run.records.metrics_jsonl import read_metrics
from sessions.loss_evaluation import LossSession
from tests import small_runs
from tests.run.frozen_model_runs import (
    check_equal,
    evaluated_each_second_step,
    train_on,
    weights_of,
    write_20_rows,
)
from tests.small_runs import BATCH, GPTJ, MODEL, RATE, finetuning, random_model

pytestmark = pytest.mark.usefixtures("few")

TEACHER = ("--config", "tiny", "--layers", "2", "--hidden_size", "64", "--d_ff", "64",
           "--heads", "2", "--d_kv", "32")  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Hugging Face's form, twice as wide and deep as the student."""
    return random_model(tmp_path_factory.mktemp("model") / "teacher", *TEACHER)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 prompts with answers."""
    return write_20_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", completion="the {}")


def train(folder: Path, teacher: Path, rows: Path, *arguments: str) -> int:
    distil = ("--training.objective", "distill", "--training.teacher", str(teacher))
    metrics = ("--eval.metrics", "loss,kd_loss,perplexity")
    return train_on(folder, rows, "random", *distil, *metrics, *arguments)


@pytest.fixture(scope="module")
def run(teacher: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, evaluated at each second one."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert train(folder, teacher, rows, *evaluated_each_second_step("kd_loss")) == 0
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """The rows of the stored files, which differ in the sizes of their records, by file name."""
    return {path.name: path.read_bytes() for path in (folder / "teacher").glob("*.rows")}


def test_a_run_tells_of_its_teacher_and_keeps_the_best(run: Path, capsys: Any) -> None:
    """The same samples are trained and evaluated: one file has the outputs of both."""
    (path,) = (run / "teacher").glob("*.rows")
    first, *_, last = read_metrics(run / "metrics.jsonl")
    assert first["loss"] == pytest.approx((first["kd_loss"] + first["cross_entropy"]) / 2)
    assert first["perplexity"] == pytest.approx(np.exp(first["cross_entropy"]))
    assert last["eval_kd_loss"] < first["kd_loss"]
    assert load_checkpoint(run / "best").step == 4
    assert run_validation.main(["--load", str(run)]) == 0
    found = json.loads((run / "eval.json").read_text())
    for name in ("loss", "kd_loss", "perplexity"):
        assert found[name] == pytest.approx(last[f"eval_{name}"], rel=1e-5)
    assert [*(run / "teacher").glob("*.rows")] == [path]
    assert "samples to compute" not in capsys.readouterr().err


@pytest.mark.slow  # test_reference_logps.py kills a pass of the same code
def test_a_pass_that_was_killed_goes_on(run, teacher, rows, tmp_path, monkeypatch, capsys) -> None:
    texts, done = LossSession.loss_stats, []

    def killed(model: LossSession, samples: Samples, first: int = 0) -> Iterator[Any]:
        for part in texts(model, samples, first):
            yield part
            done.append(part[0].start)
            if len(done) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(LossSession, "loss_stats", killed)
    assert train(tmp_path / "run", teacher, rows, "--steps", "2") == 128 + signal.SIGINT
    assert "20 of 20 samples to compute, " in capsys.readouterr().err  # and its size
    assert train(tmp_path / "run", teacher, rows, "--steps", "2") == 0
    assert train(tmp_path / "run", teacher, rows, "--steps", "4") == 0
    assert done == [0, 8, 16], "no batch is computed twice"
    assert contents(tmp_path / "run") == contents(run)
    check_equal(weights_of(tmp_path / "run"), weights_of(run))


def test_runs_share_outputs_of_the_same_teacher(
    run, teacher, rows, tmp_path, monkeypatch, capsys
) -> None:
    """By another temperature and weight too, but not of another number of tokens."""

    def fails(*_: object) -> None:
        raise AssertionError("the teacher is asked again")

    monkeypatch.setattr(FrozenModel, "_compute", fails)
    cache = ("--training.teacher_cache", str(run / "teacher"), "--steps", "2")
    other = ("--training.temperature", "2", "--training.distill_weight", "0.9")
    assert train(tmp_path / "run", teacher, rows, *cache, *other) == 0
    with pytest.raises(AssertionError, match="asked again"):
        train(tmp_path / "other", teacher, rows, *cache, "--training.top_k", "8")


@pytest.mark.slow
def test_the_weights_are_hashed_once(teacher, rows, tmp_path, monkeypatch) -> None:
    """Until they change: then the outputs are computed again."""
    hashed, real = [], safetensors_files.sha256_of_array
    monkeypatch.setattr(safetensors_files, "sha256_of_array", lambda x: hashed.append(1) or real(x))
    monkeypatch.setattr(known_digests, "MIN_AGE", 0.0)
    mine = Path(shutil.copytree(teacher, tmp_path / "teacher"))

    def trained_to(steps: str) -> tuple[int, int]:
        hashed.clear()
        assert train(tmp_path / "run", mine, rows, "--steps", steps) == 0
        return len(hashed), len([*(tmp_path / "run" / "teacher").glob("*.rows")])

    (first, _), (again, files) = trained_to("1"), trained_to("2")
    assert first > again == 0
    assert files == 1
    file, times = mine / "model.safetensors", (mine / "model.safetensors").stat()
    content = bytearray(file.read_bytes())
    content[-400::4] = bytes(byte ^ 1 for byte in content[-400::4])
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed, files = trained_to("3")
    assert changed > 0
    assert files == 2


def test_what_does_not_fit_is_named(teacher, rows, tmp_path, capsys, monkeypatch) -> None:
    def error_of(*arguments: str, teacher: Path = teacher) -> str:
        assert train(tmp_path / "run", teacher, rows, "--steps", "2", *arguments) == 2
        *_, last = capsys.readouterr().err.strip().splitlines()
        assert last.startswith("error: ")
        return str(last)

    assert "nowhere" in error_of(teacher=tmp_path / "nowhere")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert "base_model_name_or_path" in error_of(teacher=tmp_path / "adapter")
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[50], vocabulary[51] = vocabulary[51], vocabulary[50]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = error_of(teacher=other)
    assert "has another vocabulary: " in said
    assert "number 50 of the student, is number 51 there" in said
    decoder = random_model(tmp_path / "decoder", "--config", "gptj_tiny", "--layers", "1")
    assert "take a teacher that has an encoder too" in error_of(teacher=decoder)
    assert "training.top_k 2000 must be at most 1024" in error_of("--training.top_k", "2000")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 4, 5))  # type: ignore[attr-defined]
    monkeypatch.setattr("run.frozen_outputs.MAX_BYTES_IN_MEMORY", 0)
    assert "where 5 bytes are free" in error_of()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--training.objective", "distill"), "give --training.teacher FOLDER"),
        (("--training.teacher", "there"), "training.teacher is for distill, not for cross_entropy"),
        (("--training.top_k", "8"), "training.top_k is for distill"),
    ],
)
def test_settings_that_are_missing_or_not_read(arguments, said, rows, tmp_path, capsys) -> None:
    data = ("--data.train", str(rows), "--load", "random")
    command = [*MODEL, *data, *arguments, "--run-dir", str(tmp_path / "run")]
    assert run_finetuning.main(command) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_teacher_may_be_a_run_with_adapters_or_in_few_bits(teacher, rows, tmp_path) -> None:
    """Its answers are those of its export, or close to those of its weights."""
    adapted = ("--adapter.rank", "2", "--adapter.targets", "q", "v", "--steps", "2")
    data = ("--data.train", str(rows), "--load", str(teacher))
    assert small_runs.train(tmp_path / "tuned", *BATCH, *RATE, *data, *adapted) == 0
    merged = tmp_path / "merged"
    assert run_export.main(["--load", str(tmp_path / "tuned"), "--save-hf", str(merged),
                            "--merge"]) == 0  # fmt: skip
    peft = tmp_path / "peft"
    assert run_export.main(["--load", str(tmp_path / "tuned"), "--save-hf", str(peft)]) == 0
    losses = [
        first_kd_loss(tmp_path / f"run{number}", one, rows, *flags)
        for number, (one, flags) in enumerate([
            (teacher, ()), (tmp_path / "tuned", ()), (merged, ()), (peft, ()),
            (teacher, ("--training.teacher_quantization", "int8")),
        ])
    ]  # fmt: skip
    plain, tuned, exported, adapter, few_bits = losses
    assert tuned == pytest.approx(exported, rel=1e-5)
    assert tuned == pytest.approx(adapter, rel=1e-6)
    assert abs(tuned / plain - 1) > 1e-4
    assert 1e-7 < abs(few_bits / plain - 1) < 1e-2


def first_kd_loss(folder: Path, teacher: Path, rows: Path, *flags: str) -> float:
    assert train(folder, teacher, rows, "--steps", "1", *flags) == 0
    return float(read_metrics(folder / "metrics.jsonl")[0]["kd_loss"])


@pytest.mark.slow
def test_a_run_holds_the_teachers_head(teacher, rows, tmp_path, monkeypatch, capsys) -> None:
    """Continued, evaluated and exported as any; its checkpoints are without the head."""
    whole = ("--training.top_k", "null", "--training.beta", "0.5")
    best = ("--eval.steps", "2", "--checkpoint.keep_best", "kd_loss")
    at_once, halved = tmp_path / "run", tmp_path / "halved"
    assert train(at_once, teacher, rows, *whole, *best, "--steps", "4") == 0
    said = capsys.readouterr().err
    tokens = sum(path.stat().st_size for path in (at_once / "teacher").glob("*.rows")) // (64 * 4)
    assert f"20 of 20 samples to compute, {tokens * 64 * 4 / 1e3:.2f} kB" in said
    for steps in ("2", "4"):
        assert train(halved, teacher, rows, *whole, *best, "--steps", steps) == 0
    assert contents(halved) == contents(at_once)
    check_equal(weights_of(halved), weights_of(at_once))
    assert not any("teacher" in name for name in weights_of(at_once))
    *_, last = read_metrics(at_once / "metrics.jsonl")
    assert run_validation.main(["--load", str(at_once)]) == 0
    found = json.loads((at_once / "eval.json").read_text())
    assert found["kd_loss"] == pytest.approx(last["eval_kd_loss"], rel=1e-5)
    hf = tmp_path / "hf"
    assert run_export.main(["--load", str(at_once), "--save-hf", str(hf)]) == 0
    capsys.readouterr()
    plan = ("--plan", "--machine", "rtx4090", "--load", "random", "--training.objective", "distill")
    command = [*MODEL, *plan, "--training.teacher", str(teacher), *whole]
    assert run_finetuning.main(command) == 0
    assert "256 bytes a loss token" in capsys.readouterr().out


@pytest.mark.slow
def test_a_held_head_must_be_plain(teacher, rows, tmp_path, capsys) -> None:
    adapted = ("--adapter.rank", "2", "--adapter.targets", "lm_head", "--steps", "1")
    data = ("--data.train", str(rows), "--load", str(teacher))
    assert small_runs.train(tmp_path / "tuned", *BATCH, *RATE, *data, *adapted) == 0
    whole = ("--training.top_k", "null", "--steps", "1")
    assert train(tmp_path / "run", tmp_path / "tuned", rows, *whole) == 2
    assert "merge them with run_export.py --merge" in capsys.readouterr().err
    assert train(tmp_path / "run", teacher, rows, *whole, "--training.distill_rest", "bin") == 2
    assert "top_k null compares all tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_share_the_teachers_outputs(rows: Path, tmp_path: Path) -> None:
    """One writes them, all read them; the metrics are those of one process."""
    teacher = random_model(tmp_path / "teacher", "--config", "gptj_tiny", "--layers", "1",
                           "--model.seed", "5")  # fmt: skip
    flags = [*GPTJ, *RATE, "--load", "random", "--training.objective", "distill",
             "--training.teacher", str(teacher), "--data.train", str(rows),
             "--data.validation", str(rows), "--eval.steps", "2", "--data.packing", "true",
             "--eval.metrics", "loss,kd_loss"]  # fmt: skip
    found = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        for steps in ("2", "4"):
            for one in finetuning(processes, tmp_path / "executables", *flags, "--steps", steps,
                                  "--save", str(folder)):  # fmt: skip
                said = one.communicate(timeout=300)[1]
                assert one.returncode == 0, said
        found.append(read_metrics(folder / "metrics.jsonl"))
    names = ("loss", "kd_loss", "cross_entropy", "eval_loss", "eval_kd_loss")
    for one, other in zip(*found, strict=True):
        for name in set(names) & one.keys():
            assert other[name] == pytest.approx(one[name], rel=1e-4), name


@pytest.mark.slow
def test_a_plan_has_the_teachers_pass(teacher, tmp_path, capsys) -> None:
    """In its own words, and in JSON as any plan; a plan without a teacher has none."""
    distil = ("--training.objective", "distill", "--training.teacher", str(teacher))
    asks = ("--plan", "--plan-json", str(tmp_path / "plan.json"), "--machine", "rtx4090")
    few_bits = ("--training.teacher_quantization", "int4", "--training.top_k", "8")
    bits = []
    for flags in ((), few_bits):
        command = [*MODEL, "--load", "random", *distil, *flags, *asks]
        assert run_finetuning.main(command) == 0
        plan = json.loads((tmp_path / "plan.json").read_text())
        bits.append(plan["teacher"]["host_bytes"])
        assert plan["samples"] < plan["teacher"]["samples"]  # weights are loaded once for more
    said = capsys.readouterr().out
    assert "parameters in float32, once before the first step" in said
    assert "parameters in int4, once before the first step" in said
    assert "196 bytes a loss token, 196.00 MB a million" in said
    assert "52 bytes a loss token" in said
    assert bits[1] < bits[0]
    assert run_finetuning.main([*MODEL, "--load", "random", *asks]) == 0
    assert "teacher" not in json.loads((tmp_path / "plan.json").read_text())
