"""A device whose memory is full ends a run in a sentence, and leaves what was saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from jax.errors import JaxRuntimeError

import run_finetuning
from checkpoints.step_folders import list_step_folders
from popxl._run.program import Program
from tests.run.saved import digests
from tests.small_runs import DECODER_TRAINING, train

STEPS = (*DECODER_TRAINING, "--steps", "4")
FULL = (
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3.04GiB with allocator GPU_0_bfc "
    "on device 0. [executable_name='jit_popxl_segment']"
)


def fill_devices(monkeypatch: pytest.MonkeyPatch, run: int) -> None:
    """Make one run of a program (from 1) fail as XLA does on a full device."""
    real, begun = Program.run, []

    def failing(self, *given):
        begun.append(None)
        if len(begun) == run:
            raise JaxRuntimeError(FULL)
        return real(self, *given)

    monkeypatch.setattr(Program, "run", failing)


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The line of the error, which is the last one."""
    *_, last = capsys.readouterr().err.splitlines()
    return last


@pytest.mark.usefixtures("few")
def test_the_last_checkpoint_is_left_and_a_run_resumes(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    folder = Path("run")
    with monkeypatch.context() as patch:
        fill_devices(patch, run=3)
        assert train(folder, *STEPS) == 2
    assert error_of(capsys) == (
        "error: preset 'gptj_tiny': the memory of the devices is full: Out of memory while trying "
        "to allocate 3.04GiB: lower --micro_batch_size or --execution.micro_batches_per_pass, "
        "recompute with --activations recompute, or leave state in host memory with "
        f"--execution.placement host; step 2 is saved in {folder}, where a run resumes"
    )
    assert train(folder, *STEPS) == 0
    assert train(Path("whole"), *STEPS) == 0
    ends = [list_step_folders(path)[0] for path in (folder, Path("whole"))]
    assert [end.step for end in ends] == [4, 4]
    assert digests(ends[0].path) == digests(ends[1].path)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("saves", [True, False])
def test_a_run_without_a_checkpoint_says_so(saves, monkeypatch, tmp_path, capsys):
    fill_devices(monkeypatch, run=1)
    monkeypatch.chdir(tmp_path)
    given = ("--save", "run") if saves else ()
    assert run_finetuning.main([*STEPS, *given]) == 2
    expected = "no checkpoint was saved yet in run" if saves else "since --save was not given"
    assert error_of(capsys).endswith(expected)
