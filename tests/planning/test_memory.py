"""Programs that do not fit are refused before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import benchmarks.finetuning
import benchmarks.inference
import modelling.memory
import popxl


@pytest.mark.parametrize(
    ("main", "preset", "state"),
    [
        (benchmarks.finetuning.main, "xxl_pod64", "197.1 GB remote buffers"),
        (benchmarks.finetuning.main, "gptj_6B_gpu", "147.0 GB remote buffers"),
        (benchmarks.inference.main, "gptj_6B_gpu", "12.1 GB the devices' variables, "),
    ],
)
def test_a_preset_for_larger_machines_is_refused_in_one_sentence(
    main: Callable[[list[str]], int],
    preset: str,
    state: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(modelling.memory, "host_memory", lambda: 16 * 10**9)
    assert main(["--config", preset, "--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: preset {preset!r} needs ")
    assert state in message
    assert "but 16.0 GB are free: name a folder of a local disk in --execution.disk" in message
    assert message.count("\n") == 1


def test_devices_with_too_little_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(popxl.plan, "device_memory", lambda desc, replicas, instances: 10**6)
    assert benchmarks.finetuning.main(["--config", "tiny"]) == 2
    message = capsys.readouterr().err
    assert "of device memory" in message
    assert "lower --micro_batch_size" in message


def test_what_is_free_is_less_than_what_the_machine_has() -> None:
    free = modelling.memory.host_memory()
    assert free is not None
    assert 10**6 < free < 2**50
