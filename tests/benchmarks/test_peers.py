"""`benchmarks.device --peers`: equal work, LLMQ's files and log, the record, and all of it tiny."""

from __future__ import annotations

import json
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import device, llmq, peers
from benchmarks.llmq import LlmqError, measure_llmq, write_token_file
from benchmarks.peer_plans import read_plans
from benchmarks.peer_programs import (
    DEEPSPEED,
    LLMQ,
    OURS,
    TORCH,
    PeerWork,
    TorchProgram,
    count_tokens,
    split_batch,
)
from data.samples import IGNORE_INDEX
from huggingface.torch_model import build_torch_model
from modelling.model_family import get_family
from planning.hardware.machines import machine
from planning.report import make_report
from planning.requirements import finetuning_requirements
from sessions.training import TrainingSession

QWEN = PeerWork(
    "q", "qwen3_tiny", {"model.model_type": "qwen2", "execution.micro_batch_size": 4}, 256
)
GPTJ = PeerWork("g", "gptj_tiny", {"execution.micro_batch_size": 4}, 256)
T5 = PeerWork("t", "tiny", {"execution.micro_batch_size": 4}, 288)


# ---- the work is the same -----------------------------------------------------------------------
@pytest.mark.parametrize(
    "work",
    [
        pytest.param(QWEN, id="Qwen", marks=pytest.mark.slow),
        pytest.param(replace(QWEN, packed=True), id="Qwen, packed"),
        pytest.param(GPTJ, id="GPT-J", marks=pytest.mark.slow),
        pytest.param(replace(GPTJ, packed=True), id="GPT-J, packed"),
        pytest.param(T5, id="T5", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_torch_has_the_loss_and_the_update_of_ours(work: PeerWork) -> None:
    """Two steps from the same weights, of two micro-batches each."""
    config = work.config("cpu")
    weights = get_family(config).weight_map(config).init_weights(3)
    batch = work.samples(config).take(range(config.training.global_batch_size))
    files = get_family(config).weight_map(config).to_hf(weights)
    hf_config = get_family(config).to_config_json(config)
    program = TorchProgram(build_torch_model(hf_config, "float32", files), config)
    ours = TrainingSession(config)
    ours.write(weights)
    with ours:
        for step in range(2):
            loss = ours.run([batch], [1e-4], step)[0].loss
            assert program.step(batch, 4) == pytest.approx(loss, rel=2e-5)


def test_micro_batches_are_whole_and_tokens_are_counted_without_padding() -> None:
    work = replace(QWEN, packed=True)
    config = work.config("cpu")
    batch = work.samples(config).take(range(config.training.global_batch_size))
    assert config.training.global_batch_size == 8 == len(batch["labels"])
    parts = list(split_batch(batch, 4))
    assert [len(part["labels"]) for part in parts] == [4, 4]
    assert count_tokens(batch) == np.count_nonzero(batch["segment_ids"]) <= 256
    assert batch["segment_ids"].max() > 1
    config = T5.config("cpu")
    batch = T5.samples(config).take(range(config.training.global_batch_size))
    targets = np.count_nonzero(batch["labels"] != IGNORE_INDEX)
    assert count_tokens(batch) == np.count_nonzero(batch["segment_ids"]) + targets


@pytest.mark.parametrize("model", peers.SHAPES)
def test_the_shapes_are_the_models(model: str) -> None:
    preset, fields = peers.SHAPES[model]
    config = PeerWork(model, preset, fields).config("cpu")
    sizes = {  # parameters by their model cards, in billions
        "Qwen2.5 1.5B": 1.54, "Qwen2.5 3B": 3.09, "Qwen2.5 7B": 7.62, "GPT-J 6B": 6.05,
        "FLAN-T5 XL": 2.85,
    }  # fmt: skip
    weights = get_family(config).weight_map(config).weights
    parameters = sum(int(np.prod(w.shape)) for w in weights)
    assert parameters / 1e9 == pytest.approx(sizes[model], rel=0.01)
    length = config.model.sequence_length + getattr(config.model, "decoder_sequence_length", 0)
    assert config.training.global_batch_size * length == pytest.approx(131_072, rel=0.02)


# ---- LLMQ ---------------------------------------------------------------------------------------
def test_a_token_file_is_as_llmq_reads_it(tmp_path: Path) -> None:
    tokens = np.arange(11, dtype=np.int32)
    write_token_file(tmp_path / "t.bin", tokens, 576, tokens % 3 == 0)
    data = (tmp_path / "t.bin").read_bytes()
    assert data[:8] == b"BIN.TOK\n"
    assert np.frombuffer(data[8:28], "<i4").tolist() == [2, 4, 11, 576, 1]
    assert np.frombuffer(data[1024 : 1024 + 44], "<i4").tolist() == tokens.tolist()
    bits = np.unpackbits(np.frombuffer(data[1068:], np.uint8), bitorder="little")
    assert bits[:11].tolist() == (tokens % 3 == 0).astype(int).tolist()
    assert len(data) == 1024 + 44 + 2


FAKE = """#!/usr/bin/env python3
import sys, time
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
if {fails} and "--recompute-norm" not in sys.argv:
    sys.exit("cudaErrorMemoryAllocation")
for step in range(1000):
    print(f"[T] step {{step:5d}} [ 19.9%] | time:  {{2000 - 100 * step}} ms | norm   4.3 | loss   "
          f"6.25 | tps 35064 | sol 42.9%", flush=True)
    time.sleep(0.01)
"""


def fake_llmq(folder: Path, fails: bool = False) -> Path:
    """A program that prints steps as LLMQ does, and records its arguments."""
    binary = folder / "train"
    binary.write_text(FAKE.format(log=str(folder / "arguments"), fails=fails))
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    return binary


@pytest.mark.parametrize("packed", [False, True])
def test_llmq_is_started_and_its_steps_are_read(packed: bool, tmp_path: Path) -> None:
    work = replace(QWEN, packed=packed, steps=3)
    started = time.monotonic()
    times = measure_llmq(fake_llmq(tmp_path), work, tmp_path, 60)
    assert time.monotonic() - started < 30, "it is ended after its steps"
    assert times["seconds"] == 1.7, "the median of steps 2, 3 and 4"
    assert (times["loss"], times["micro_batch_size"]) == (6.25, 4)
    arguments = (tmp_path / "arguments").read_text().split()
    assert {"--from-scratch", "--model-dtype=bf16", "--seq-len=32"} <= set(arguments)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen2"
    header = np.frombuffer((tmp_path / "train.bin").read_bytes()[8:28], "<i4")
    accumulation = next(int(a.partition("=")[2]) for a in arguments if "accumulation" in a)
    assert header[2] >= accumulation * 4 * 32 * work.steps
    assert header[4] == packed
    config = work.config("cpu")
    batch = work.samples(config).take(range(config.training.global_batch_size))
    if packed:  # the labels of the same texts, each in a row of its own
        assert times["tokens"] == pytest.approx(count_tokens(batch), rel=0.05)
        assert accumulation > 2
    else:
        assert (times["tokens"], accumulation) == (256, 2)


def test_llmq_saves_less_where_memory_does_not_suffice(tmp_path: Path) -> None:
    times = measure_llmq(fake_llmq(tmp_path, fails=True), QWEN, tmp_path, 60)
    assert times["state"].endswith("recompute-swiglu, recompute-norm")


def test_llmq_that_fails_is_told_with_its_last_line(tmp_path: Path) -> None:
    binary = tmp_path / "train"
    binary.write_text("#!/bin/sh\necho no such device\nexit 3\n")
    binary.chmod(0o700)
    with pytest.raises(LlmqError, match="exit code 3: no such device"):
        measure_llmq(binary, QWEN, tmp_path, 60)


# ---- the record ---------------------------------------------------------------------------------
TIMES = {"seconds": 2.0, "first_step": 9.5, "tokens": 512, "loss": 6.0, "micro_batch_size": 4,
         "state": "bfloat16 weights", "peak_device_bytes": None}  # fmt: skip


def test_results_are_written_as_they_come_and_an_error_ends_one_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    peer_runs = peers.list_peer_runs(tiny=True, has_llmq=True)
    programs = [program for program, _ in peer_runs]
    assert set(programs) == {OURS, LLMQ, DEEPSPEED, *TORCH}
    assert [work.model for program, work in peer_runs if program == LLMQ].count("tiny T5") == 0
    written = []

    def run(peer_run: peers.PeerRun, timeout: float) -> dict[str, Any]:
        assert 0 < timeout <= peers.LONGEST
        if (path := tmp_path / "peers.json").exists():
            written.append(len(json.loads(path.read_text())))
        if peer_run[0] == TORCH[0]:
            raise TimeoutError("stopped after 1 s")
        return TIMES

    rows = peers.record_peers(tmp_path, peer_runs, 12, run, {DEEPSPEED: "pip install deepspeed"})
    assert written[:4] == [1, 2, 3, 4][: len(written[:4])]
    saved = json.loads((tmp_path / "peers.json").read_text())
    assert len(saved) == len(rows) == len(peer_runs)
    assert {row["error"] for row in saved if row["program"] == TORCH[0]} == {"stopped after 1 s"}
    assert {row["error"] for row in saved if row["program"] == DEEPSPEED} == {
        "not installed: pip install deepspeed"
    }
    assert {row["gpu"] for row in saved} == {None}
    table = (tmp_path / "peers.md").read_text()
    assert "| tiny Qwen2.5 | 512 | ours | 2.000 | 256 | 9.5 |  |  | bfloat16 weights |" in table
    assert "ours, bfloat16 state" in table


def test_nothing_is_begun_after_the_time(tmp_path: Path) -> None:
    peer_runs = peers.list_peer_runs(tiny=True, has_llmq=False)
    rows = peers.record_peers(tmp_path, peer_runs[:2], 0.0, lambda *_: pytest.fail("begun"))
    assert [row.error for row in rows] == ["not begun, for lack of time"] * 2


def test_power_and_clocks_are_those_under_load(tmp_path: Path, monkeypatch) -> None:
    lines = ["90.1, 345, 2619", "690.0, 1400, 2619", "700.0, 1300, 2619", "[N/A], 1, 1", ""]
    expected = {"watts": 695.0, "max_watts": 700.0, "sm_mhz": 1350.0, "min_sm_mhz": 1300.0,
                "memory_mhz": 2619.0}  # fmt: skip
    assert peers.summarize_samples(lines) == expected
    assert peers.summarize_samples(["[N/A], [N/A], [N/A]"]) is None
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho "690.0, 1400, 2619"\nexec sleep 60\n')
    smi.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with peers.GpuLog() as log:
        time.sleep(0.5)
    assert log.summary is not None
    assert log.summary["watts"] == 690.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--llmq", "/nonexistent"], "there is no file /nonexistent"),
        (["--models", "GPT-5"], "--models: there is no 'GPT-5'; there are: FLAN-T5 XL"),
        (["--programs", "nobody"], "--programs: there is no 'nobody'"),
        (["--machine", "h100"], "--machine is for plans: give --plan too, or leave it out"),
        (["--plan", "--minutes", "3"], "--minutes is for measured programs: leave it out"),
        (["--plan", "--programs", "ours"], "--programs is for measured programs"),
        (["--plan", "--machine", "h1000"], "did you mean h100"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, tmp_path, capsys) -> None:
    assert device.main(["--peers", str(tmp_path / "p"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_plans_of_our_rows_need_no_device(tmp_path: Path, capsys, monkeypatch) -> None:
    small_state = replace(GPTJ, fields={**GPTJ.fields, **peers.SAME_STATE}, packed=True)
    runs = [(OURS, GPTJ), (LLMQ, GPTJ), (OURS, small_state)]
    monkeypatch.setattr(peers, "list_peer_runs", lambda *_: runs)
    assert device.main(["--peers", str(tmp_path), "--plan", "--machine", "h200"]) == 0
    first, second = read_plans(tmp_path)
    requirements = finetuning_requirements(GPTJ.config(), machine("h200").target)
    report = make_report("", requirements, replace(machine("h200"), devices=1))
    assert first.seconds == round(report.expected_seconds, 3)
    assert (first.device_bytes, first.fits) == (report.device_bytes, True)
    assert (first.machine, first.tokens, first.micro_batch_size) == ("h200", 256, 4)
    assert (first.packed, second.packed) == (False, True)
    table = capsys.readouterr().out
    assert table.startswith("Model | Tokens | Moments, sums | Micro-batch | NVIDIA H200 SXM | GB")
    assert "g | 256 | float32, float32 | 4 | 0.0" in table
    assert "g, packed | 256 | bfloat16, bfloat16 | 4 | 0.0" in table


@pytest.mark.slow  # torch in several processes
def test_all_of_it_tiny(tmp_path: Path, capsys) -> None:
    models = ["--models", "tiny Qwen2.5"]
    binary = ["--llmq", str(fake_llmq(tmp_path))]
    folder, limit = tmp_path / "peers", ["--longest", "600"]
    assert (
        device.main(["--peers", str(folder), "--tiny", *models, *binary, "--minutes", "30", *limit])
        == 0
    )
    rows = json.loads((folder / "peers.json").read_text())
    failed = {row["program"]: row["error"] for row in rows if row["error"]}
    assert set(failed) <= {DEEPSPEED}
    assert {row["program"] for row in rows} >= {OURS, LLMQ, *TORCH}
    for row in rows:
        if row["error"] is None and row["program"] != LLMQ:
            assert 1 < row["times"]["loss"] < 100
            assert row["times"]["first_step"] > row["times"]["seconds"] > 0
    assert llmq.MODEL_TYPES[0] == "qwen2"
