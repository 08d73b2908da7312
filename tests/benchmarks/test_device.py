"""Device records of tiny presets on a CPU that transfers entries as a GPU does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks import device, device_tasks
from benchmarks.device import list_tasks, record_tasks, run_in_process
from config.errors import UserError
from planning.hardware.machines import machine
from planning.hardware.memory_check import NotEnoughMemoryError
from popxl._compile import platforms

TINY = ["--device", "cpu", "--runs", "1", "--mebibytes", "1", "--size", "64"]
FIELDS = (
    "training.global_batch_size=2",
    "execution.micro_batch_size=1",
    "execution.update=deferred",
)
SMALL = [word for field in FIELDS for word in ("--set", field)]


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate two memories, device memory for a tiny model, and a machine with a host link
    to compare with."""
    monkeypatch.setattr(platforms.Cpu, "host_memory", "pinned_host")
    monkeypatch.setattr(device_tasks, "_get_machine", lambda config: machine("h200"))
    monkeypatch.setattr("popxl.plan.device_memory", lambda *_: 2 * 10**8)


def run_here(arguments: Sequence[str], timeout: float) -> dict[str, Any]:
    """Run a task in this process."""
    args = device_tasks.parse_arguments(arguments)
    return json.loads(json.dumps(device_tasks.TASKS[args.task](args)))


@pytest.mark.usefixtures("simulated_gpu")
def test_rates_are_measured_and_written(tmp_path: Path) -> None:
    tasks = list_tasks(["gptj_tiny"], ["gptj_tiny_fp8"], ["gptj_tiny"])
    assert [name for name, _ in tasks] == [
        "bandwidths", "matrix rate", "matrix rate, FP8", "gptj_tiny, traced", "gptj_tiny, auto",
        "gptj_tiny, host",
        "gptj_tiny, CUDA graphs", "gptj_tiny_fp8, FP8", "gptj_tiny, generation",
    ]  # fmt: skip
    found = record_tasks(tmp_path, tasks[:3], TINY, run=run_here)
    assert [each.error for each in found] == [None] * 3
    bandwidths, matrix, fp8 = (each.metrics["measured"] for each in found)
    assert min(bandwidths[way] for way in ("loads", "stores", "both", "memory")) > 0
    assert json.loads((tmp_path / "record.json").read_text())[1]["metrics"]["measured"] == matrix
    own = machine(str(tmp_path / "machine.yml"))
    rates = {"bfloat16": matrix["flops"], "float16": matrix["flops"], "float8": fp8["flops"]}
    assert own.flops == {**machine("laptop").flops, **rates}
    assert (own.bandwidth, own.host_link) == (bandwidths["memory"], bandwidths["both"])
    assert own.achieved_rates("bfloat16", 1).flops == matrix["flops"], "no fraction of it"
    assert own.achieved_rates("bfloat16", 1).bandwidth == bandwidths["memory"]
    assert own.memory == 2e8
    assert own.title == "cpu, as measured"


@pytest.mark.slow  # a minute on 2 cores
@pytest.mark.usefixtures("simulated_gpu")
def test_presets_are_measured_beside_the_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Automatic placement, all in host memory, FP8, and generation."""
    tasks = list_tasks(["gptj_tiny"], ["gptj_tiny_fp8"], ["gptj_tiny"])
    found = record_tasks(tmp_path, tasks[4:], [*TINY, *SMALL], run=run_here)
    assert [each.error for each in found] == [None] * 5
    for each in found:
        assert each.metrics["measured"]["seconds"] > 0
        assert each.metrics["predicted"]["seconds"] > 0
        assert f"| {each.name} | {each.metrics['measured']['seconds']:.3f} |" in (
            tmp_path / "record.md"
        ).read_text(encoding="utf-8")
    placed, host, *_ = (each.metrics["measured"] for each in found)
    assert host["loads_apart"] > 0
    said = capsys.readouterr().err
    assert "placement: " in said
    assert "activations saved by GPTJBlock" in said
    moved = [each.metrics["predicted"]["exposed_transfers"] for each in found[:2]]
    assert moved[0] <= moved[1]
    assert placed.keys() == host.keys()


def test_what_fails_or_has_no_time_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    def run(arguments: Sequence[str], timeout: float) -> dict[str, Any]:
        if arguments[0] == "matrix":
            raise RuntimeError("no memory")
        return {"measured": {"loads": 1.0}}

    tasks = list_tasks([], [], [])
    assert [each.error for each in record_tasks(tmp_path, tasks, run=run)] == [None, "no memory"]
    found = record_tasks(tmp_path, tasks, minutes=0.1, run=run)
    assert {each.error for each in found} == {"not begun, for lack of time"}


def test_fewer_layers_where_memory_is_short() -> None:
    args = device_tasks.parse_arguments(["train", *TINY, "--config", "tiny"])
    tried = []

    def measure(config: Any, runs: int) -> dict[str, Any]:
        tried.append(config.model.layers)
        if len(tried) < 2:
            raise NotEnoughMemoryError("host", 2, 1, "state")
        return {}

    found = device_tasks._measure_largest_that_fits(args, "finetuning", measure)
    assert found == {"layers": tried[0] // 2}
    none = NotEnoughMemoryError("host", 2, 1, "state")
    short = mock.patch.object(device_tasks, "check_lower_bound", side_effect=none)
    with short, pytest.raises(UserError, match="with one layer"):
        device_tasks._measure_largest_that_fits(args, "finetuning", measure)


def test_a_task_that_fails_in_its_process_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 1 >&2; echo 'error: no '$5 >&2; exit 2\n")
    python.chmod(0o700)
    monkeypatch.setattr(device.sys, "executable", str(python))
    with pytest.raises(RuntimeError, match="^error: no none$"):
        run_in_process(["train", "--config", "none", *TINY], 60)


@pytest.mark.slow  # a start
def test_a_task_says_that_a_preset_is_unknown() -> None:
    with pytest.raises(RuntimeError, match="unknown preset"):
        run_in_process(["train", "--config", "none", *TINY], 60)
