"""Programs that do not fit are refused before anything is allocated."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import finetuning
import inference
import planning.report
import popxl
from modelling.generation import GreedyStrategy
from modelling.model_family import get_family
from planning.generation_placement import build_generation_program
from planning.hardware import disk_offload, memory_check
from planning.hardware.disk_offload import check_fits_memory, offload_if_needed
from planning.hardware.machines import machines
from planning.hardware.memory_check import NotEnoughMemoryError
from planning.report_text import format_report
from planning.requirements import Requirements, finetuning_requirements, generation_requirements
from sessions.training import TrainingSession
from tests.planning.presets import preset
from tests.slow import slow

WIDE = {"layers": 1, "hidden_size": 512}
"""Sizes whose entries are worth a request to a disk."""


@pytest.mark.parametrize(
    ("main", "preset", "state"),
    [
        slow(finetuning.main, "xxl_pod64", "184.2 GB remote buffers"),
        slow(finetuning.main, "gptj_6B_gpu", "103.7 GB remote buffers"),
        (inference.main, "gptj_6B_gpu", "73.6 GB remote buffers"),
    ],
)
def test_a_preset_for_larger_machines_is_refused_in_one_sentence(
    main: Callable[[list[str]], int],
    preset: str,
    state: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in (memory_check, disk_offload):
        monkeypatch.setattr(module, "available_host_bytes", lambda: 16 * 10**9)
    assert main(["--config", preset, "--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: preset {preset!r} needs ")
    assert state in message
    assert "but 16.0 GB are free: add --execution.disk DIR, a folder of a local disk" in message
    (stored,) = re.findall(r"\(([\d.]+) GB remote buffers", message)
    (disk,) = re.findall(r"local disk with ([\d.]+) GB free", message)
    assert float(stored) - 16 < float(disk) < float(stored)
    assert message.count("\n") == 1


def test_devices_with_too_little_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(popxl.plan, "device_memory", lambda *_: 10**6)
    small = ("--layers", "1", "--execution.activations", "recompute")
    assert finetuning.main(["--config", "gptj_tiny", *small]) == 2
    message = capsys.readouterr().err
    assert "of device memory" in message
    assert "lower --micro_batch_size" in message


def test_what_is_free_is_less_than_what_the_machine_has() -> None:
    free = memory_check.available_host_bytes()
    assert free is not None
    assert 10**6 < free < 2**50


def test_entries_of_a_gpu_leave_the_host_some_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the pool that they live in does; what a limit allows, they may take."""
    config = preset("gptj_tiny")
    ir = finetuning_requirements(config).traced.ir
    needed = popxl.plan.storage_of(ir).remote
    monkeypatch.setattr(popxl.plan, "device_memory", lambda *_: 10**15)
    monkeypatch.setattr(memory_check, "available_host_bytes", lambda: needed)
    with pytest.raises(NotEnoughMemoryError):
        memory_check.check_memory(ir, "cpu")
    memory_check.check_memory(ir, "cpu", host_bytes=needed)
    monkeypatch.setattr(memory_check, "available_host_bytes", lambda: int(needed / 0.95) + 2)
    memory_check.check_memory(ir, "cpu")


def test_the_disk_that_a_message_names_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """And generation uses it, too: weights that do not fit are streamed."""
    config = preset("gptj_tiny", model=WIDE, execution={"device": "cpu"})
    ir, another = (finetuning_requirements(config).traced.ir for _ in range(2))
    needed = popxl.plan.plan_of(ir)
    for module in (memory_check, disk_offload):
        monkeypatch.setattr(
            module, "available_host_bytes", lambda: needed.remote + needed.device_bytes - 1
        )
    with pytest.raises(NotEnoughMemoryError) as error:
        check_fits_memory(config, ir)
    assert error.value.disk is not None
    assert 0 < error.value.disk <= needed.remote
    config = config.with_values({"execution.disk": "anywhere"})
    offload_if_needed(config, another)
    check_fits_memory(config, another)
    assert popxl.plan.storage_of(another).disk == error.value.disk
    monkeypatch.setattr(disk_offload, "available_host_bytes", lambda: 10**6)
    config = config.with_values({"model.eval": True})
    program = build_generation_program(config, get_family(config), GreedyStrategy())
    assert any(buffer.kind == "weights" for buffer in program.ir.remote_buffers)


@pytest.mark.parametrize("trained", [True, slow(False)])
def test_a_limit_is_kept_by_plan_and_run_or_refused_with_the_least(
    trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the state that can be is on disk then; with a program as small as it is."""
    for name in ("PROCESS_BYTES", "IO_BUFFERS"):
        monkeypatch.setattr(disk_offload, name, 1000)
    monkeypatch.setattr(planning.report, "PROCESS_BYTES", 1000)
    config = preset("gptj_tiny", model=WIDE, execution={"device": "cpu"})
    config = config.with_values({"execution.disk": "anywhere", "model.eval": not trained})

    def requirements(limit: float) -> Requirements:
        limited = config.with_values({"execution.host_memory": limit})
        if trained:
            return finetuning_requirements(limited)
        return generation_requirements(limited.with_values({"generation.weights": "streamed"}))

    def run(limit: float) -> popxl.Ir:
        made = requirements(limit)
        offload_if_needed(made.config, made.traced.ir)
        check_fits_memory(made.config, made.traced.ir)
        return made.traced.ir

    with pytest.raises(NotEnoughMemoryError) as error:
        run(1e-6)
    least = error.value.needed
    assert popxl.plan.storage_of(run(least / 1e9)).disk > 0
    on = replace(machines()["laptop"], host_memory=1e15)
    for limit, fits in ((least, True), (least - 1, False)):
        made = planning.report.make_report("gptj_tiny", requirements(limit / 1e9), on)
        assert made.fits == fits
        assert made.memory_use["memory"] == (least, limit)
        assert " -" not in format_report(made).partition("buffers")[2].partition("work")[0]
    assert popxl.plan.storage_of(run(1.0)).disk == 0


def test_a_limit_that_no_program_keeps_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = ("--execution.disk", str(tmp_path), "--execution.host_memory", "0.3")
    assert finetuning.main(["--config", "gptj_tiny", *limit]) == 2
    said = capsys.readouterr().err
    requirements = r"error: preset 'gptj_tiny' needs \d\.\d GB of host memory at the least "
    ends = "but execution.host_memory is 0.3: raise it, or lower --micro_batch_size\n"
    assert re.match(requirements + r"\(.*0.7 GB the program", said)
    assert said.endswith(ends)


@pytest.mark.parametrize(("io_buffer_bytes", "estimated"), [(1000, 0.0), (20 * 10**6, 0.9)])
def test_a_program_that_takes_more_than_planned_has_more_of_its_state_on_disk(
    io_buffer_bytes: int, estimated: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Estimates of intermediate values may be low, by less than the windows too; the limit is kept
    all the same."""
    monkeypatch.setattr(disk_offload, "PROCESS_BYTES", 1000)
    monkeypatch.setattr(disk_offload, "IO_BUFFERS", io_buffer_bytes)
    execution = {"device": "cpu", "disk": str(tmp_path)}
    config = preset("gptj_tiny", model=WIDE, execution=execution)
    plan = popxl.plan.plan_of(finetuning_requirements(config).traced.ir)
    limit = plan.device_bytes * 1.2 + plan.remote / 2
    config = config.with_values({"execution.host_memory": limit / 1e9})
    low = replace(plan, temporaries=int(plan.temporaries * estimated))
    monkeypatch.setattr(popxl.plan, "plan_of", lambda ir: low)
    use = TrainingSession(config).session.memory_use()
    assert 0 < use.disk < plan.remote
    assert disk_offload.host_bytes_per_process(use, 1) <= limit
