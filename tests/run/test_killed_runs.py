"""Runs that are killed at random moments go on as if nothing had happened, bit for bit.

The slow tests kill twenty times, the other once, and then its terminal is gone: a run of one
process, and one process of a run of four, which the others must notice. A run with its state on
disk is killed a hundred times.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import run_finetuning
from checkpoints.step_folders import list_step_folders
from run.records.metrics_jsonl import StepMetrics, read_metrics
from tests.run.saved import digests, flip_in
from tests.small_runs import (
    ENCODER_DECODERS,
    GPTJ,
    RATE,
    TRAINING,
    few_examples,
    finetuning,
)

SEED = 20
FLAGS = [*TRAINING, "--checkpoint.steps", "3"]
WITHOUT_END = ["--steps", "300000", "--to_keep", "3"]
FLAGS_OF_LLAMA = [
    *("--config", "qwen3_tiny", "--num_hidden_layers", "2", "--hidden_size", "32"),
    *("--model.intermediate_size", "48"),
    *("--device", "cpu", "--data_parallel", "2", "--tensor_parallel", "4"),
    *("--global_batch_size", "8", "--micro_batch_size", "2", "--precision", "bfloat16"),
    *("--checkpoint.steps", "3", *RATE),
]
"""Four devices hold two heads of keys; weights are rounded at random."""
FLAGS_ON_DISK = [
    *("--config", "gptj_tiny", "--layers", "2", "--hidden_size", "128", "--heads", "4"),
    *("--device", "cpu", "--global_batch_size", "8", "--micro_batch_size", "4"),
    *("--checkpoint.steps", "3", *RATE, "--dropout_prob", "0.1"),
]
"""Entries are large enough for a disk."""
ALL_ON_DISK = """\
import planning.hardware.disk_offload as disk_offload
disk_offload.check_memory_limit = lambda *_: None
"""
"""A limit below what any program takes puts all on disk that can be."""
FLAGS_OF_FEW = [*GPTJ, *RATE, "--dropout_prob", "0.1", "--checkpoint.steps", "3"]
"""A program that compiles soon."""
FLAGS_OF_LENGTHS = [
    *("--device", "cpu", "--global_batch_size", "8", "--micro_batch_size", "4"),
    *("--checkpoint.steps", "3", *RATE, "--dropout_prob", "0.1", "--data.length_buckets", "16"),
]
FLAGS_OF_SEVERAL = [*GPTJ, *RATE, "--checkpoint.steps", "2"]


def start(
    folder: Path,
    executables: Path,
    *flags: str,
    processes: int = 1,
    given: Sequence[str] | None = None,
) -> list[subprocess.Popen[str]]:
    """The command in some processes; `given`: what is trained."""
    given = given or (FLAGS if processes == 1 else FLAGS_OF_SEVERAL)
    run = (processes, executables, *given, "--save", str(folder), *flags)
    return finetuning(*run, first=ALL_ON_DISK if "--execution.disk" in flags else "")


# ---- damage -------------------------------------------------------------------------------------
def flip(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    flip_in(file)


def truncate(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 100)


def remove(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    file.unlink()


@dataclass
class Lives:
    """A run in `folder` that is killed again and again, and what was seen of it."""

    folder: Path
    executables: Path
    rows: list[StepMetrics] = field(default_factory=list)
    saved: dict[int, list[dict[str, str]]] = field(default_factory=dict)
    spoiled: set[Path] = field(default_factory=set)
    while_saving: int = 0
    processes: int = 1
    flags: tuple[str, ...] = ()
    given: Sequence[str] | None = None

    def start(self, folder: Path, *flags: str) -> list[subprocess.Popen[str]]:
        """The command in the run's processes."""
        return start(
            folder,
            self.executables,
            *flags,
            processes=self.processes,
            given=self.given,
        )

    def live(
        self, seconds: float, further: bool, victim: int, number: int = signal.SIGKILL
    ) -> None:
        """Run from the newest good step, which is where a warning about a damaged one leads; kill.

        Args:
            seconds: from the end of the first step to the kill.
            further: begin to count them when this life has saved a step.
            victim: the process that is killed.
            number: of the signal. SIGHUP comes with a log that nobody reads, and the run saves.
        """
        newest, damaged = self.good()
        load = [] if newest is None or self.processes > 1 else ["--load", str(self.folder)]
        runs = self.start(self.folder, *WITHOUT_END, *load, *self.flags)
        first = runs[0].stderr
        assert first is not None
        said = []
        while not said or not said[-1].startswith("step "):
            said.append(first.readline())
            assert said[-1], said
        while len(list_step_folders(self.folder)) < 2 or (further and self.good()[0] == newest):
            time.sleep(0.01)
        time.sleep(seconds)
        if number == signal.SIGHUP:
            first.close()
            runs[0].stderr = None
        runs[victim].send_signal(number)
        for _ in range(600):  # a minute, and no less where this process is stopped for a while
            if all(run.poll() is not None for run in runs):
                break
            time.sleep(0.1)
        for run in runs:
            run.kill()  # else what did not end would be waited for
        rest = [run.communicate()[1] for run in runs]
        codes = [1] * self.processes
        codes[victim] = -number if number == signal.SIGKILL else 128 + number
        assert [run.returncode for run in runs] == codes, rest
        if self.processes > 1:
            named = [line for text in rest for line in text.splitlines() if "ended" in line]
            pid = runs[victim].pid
            error = f"error: process {victim} of {self.processes} (pid {pid} on "
            assert [line[: len(error)] for line in named] == [error], "\n".join(rest)
        origin = "random weights" if newest is None else f"step {newest} in {self.folder}"
        assert f"starting from {origin}\n" in said
        warned = [line for line in said if line.startswith("warning")]
        assert len(warned) == (damaged is not None)
        if damaged is not None:
            assert f"the checkpoint of step {damaged} is damaged" in warned[0]
            assert f"using that of step {newest}" in warned[0]
        self._look()

    def _look(self) -> None:
        self.while_saving += any(p.name.startswith(".") for p in self.folder.iterdir())
        self.rows += read_metrics(self.folder / "metrics.jsonl")
        for _, step, path in list_step_folders(self.folder):
            if path in self.spoiled:
                continue
            self.saved.setdefault(step, []).append(digests(path))

    def good(self) -> tuple[int | None, int | None]:
        """The step of the newest good checkpoint, and that of the damaged one before which it must
        be looked for, if there is one."""
        folders = list_step_folders(self.folder)
        damaged = [f.step for f in folders[:1] if f.path in self.spoiled]
        steps = [f.step for f in folders if f.path not in self.spoiled]
        return steps[0] if steps else None, damaged[0] if damaged else None

    def spoil(self, how: Callable[[Path], None]) -> None:
        """Damage the newest checkpoint."""
        newest = list_step_folders(self.folder)[0].path
        how(newest)
        self.spoiled.add(newest)


def killed(
    folder: Path,
    executables: Path,
    kills: int,
    damages: dict[int, Callable],
    processes: int = 1,
    flags: tuple[str, ...] = (),
    given: Sequence[str] | None = None,
    last: int = signal.SIGKILL,
) -> Lives:
    """A run after `kills` deaths, of which `last` is the last one's signal; `damages` says before
    which life the newest step is spoiled."""
    print(f"moments of the kills are from seed {SEED}")
    moments = random.Random(SEED)
    lives = Lives(folder, executables, processes=processes, flags=flags, given=given)
    due: list[Callable] = []
    for life in range(kills):
        due += [damages[life]] if life in damages else []
        if due and lives.good()[1] is None:  # since the last damage something was saved
            lives.spoil(due.pop(0))
        seconds = moments.uniform(0.0, 0.8)
        victim = moments.randrange(processes) if processes > 1 else 0
        number = last if life == kills - 1 else signal.SIGKILL
        lives.live(seconds, life % 2 == 0, victim, number)
        print(f"killed after {seconds:.3f} s; the newest checkpoint is of step {lives.good()[0]}")
    assert not due
    print(f"{lives.while_saving} of {kills} kills were in the middle of a save")
    return lives


def check_against_an_uninterrupted_run(lives: Lives, folder: Path) -> None:
    last = max(lives.saved)
    flags = ["--steps", str(last), "--to_keep", str(last)]
    if lives.processes == 1:  # what this process has imported need not be again
        with few_examples(lives.executables):
            given = [*(lives.given or FLAGS), "--save", str(folder), *lives.flags, *flags]
            assert run_finetuning.main(given) == 0
    else:
        for run in lives.start(folder, *flags):
            errors = run.communicate()[1]
            assert run.returncode == 0, errors
    reference = {step: digests(path) for _, step, path in list_step_folders(folder)}
    for step, found in lives.saved.items():
        assert all(one == reference[step] for one in found), f"step {step} differs"
    rows = {row["step"]: row for row in read_metrics(folder / "metrics.jsonl")}
    for row in (row for row in lives.rows if row["step"] in rows):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert row[name] == rows[row["step"]][name], f"{name} of step {row['step']}"
    assert len({row["step"] for row in lives.rows}) >= last  # none is missing


def test_killed_and_then_without_a_terminal(tmp_path, executables):
    few = {"given": FLAGS_OF_FEW, "last": signal.SIGHUP}
    lives = killed(tmp_path / "run", executables, 2, {1: flip}, **few)
    assert lives.good()[0] == lives.rows[-1]["step"], "what was done is not saved"
    check_against_an_uninterrupted_run(lives, tmp_path / "reference")


@pytest.mark.slow
def test_killed_twenty_times(tmp_path, executables):
    damages = {4: flip, 8: truncate, 12: remove, 16: flip}
    lives = killed(tmp_path / "run", executables, 20, damages)
    assert lives.while_saving >= 3  # else the moments were not those that matter
    check_against_an_uninterrupted_run(lives, tmp_path / "reference")


@pytest.mark.slow
def test_a_llama_killed_six_times(tmp_path, executables):
    lives = killed(tmp_path / "run", executables, 6, {2: flip}, given=FLAGS_OF_LLAMA)
    check_against_an_uninterrupted_run(lives, tmp_path / "reference")


@pytest.mark.slow
def test_with_updates_behind_a_llama_is_killed_six_times(tmp_path, executables):
    """A run with deferred updates saves the same as one with updates at the end of a step."""
    flags = ("--execution.update", "deferred")
    given = FLAGS_OF_LLAMA
    lives = killed(tmp_path / "run", executables, 6, {3: flip}, flags=flags, given=given)
    check_against_an_uninterrupted_run(lives, tmp_path / "reference")


@pytest.mark.slow
def test_one_of_four_processes_killed_twenty_times(tmp_path):
    lives = killed(tmp_path / "run", tmp_path / "executables", 20, {}, processes=4)
    check_against_an_uninterrupted_run(lives, tmp_path / "reference")


def check_on_disk(folder: Path, executables: Path, kills: int) -> Lives:
    """Kill a run whose state is on disk; what it saved is what a run in memory saves."""
    disk = folder / "disk"
    flags = ("--execution.disk", str(disk), "--execution.host_memory", "0.001")
    given = FLAGS_ON_DISK
    lives = killed(folder / "run", executables, kills, {}, flags=flags, given=given)
    (left,) = disk.iterdir()
    assert [path.name for path in left.iterdir()] == ["lock"]
    (run,) = lives.start(folder / "run", "--steps", str((lives.good()[0] or 0) + 3), *flags)
    errors = run.communicate()[1]
    assert run.returncode == 0, errors
    assert not list(disk.iterdir())  # the next run removes what a killed one left
    check_against_an_uninterrupted_run(lives, folder / "reference")
    return lives


@pytest.mark.slow
def test_on_disk_killed_a_hundred_times(tmp_path, executables):
    lives = check_on_disk(tmp_path, executables, int(os.environ.get("KILLS", "100")))
    assert lives.while_saving


@pytest.mark.slow
@pytest.mark.quickly
@pytest.mark.parametrize("kind", ["umt5", "m2m_100", "t5gemma2"])
def test_an_encoder_decoder_is_killed(kind, tmp_path, executables):
    """With samples of two lengths, and dropout."""
    given = [*ENCODER_DECODERS[kind], *FLAGS_OF_LENGTHS]
    lives = killed(tmp_path / "run", executables, 2, {}, given=given)
    check_against_an_uninterrupted_run(lives, tmp_path / "reference")
