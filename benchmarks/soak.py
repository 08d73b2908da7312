"""Soak test: interrupt a small run at random, and compare it with an uninterrupted one.

    python3 -m benchmarks.soak --minutes 30 --folder /scratch/mine --record records.jsonl

The run trains on the sample data, saves every third step, is copied to a mirror and serves its
metrics. Each time that it is started, some of this happens to it, by chance:

- more idle connections to the metrics port than it can open files;
- a full disk, as the kernel shows it (RLIMIT_FSIZE), for a while or for good;
- a mirror that dies, and is back before the next start;
- SIGKILL or SIGTERM;
- after an end with a complete mirror, the loss of its folder.

It must end with the code of what happened, and without a traceback; start where it had saved last;
and never lose a step that was saved. At the end all of its steps are trained once more without
disturbances: losses and norms of all steps, and all bits of the last one, must be the same, on the
disk and in the mirror.
"""

from __future__ import annotations

import hashlib
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.disk_offload import append_record
from checkpoints import load_checkpoint
from checkpoints.object_store import RemoteRun
from checkpoints.step_folders import list_step_folders
from config.errors import UserError
from run.records.metrics_jsonl import StepMetrics, read_metrics
from terminal.entry_point import entry_point
from terminal.parser import Parser

FLAGS = (
    *("--config", "tiny", "--layers", "1", "--hidden_size", "32", "--d_ff", "32", "--heads", "2"),
    *("--global_batch_size", "8", "--micro_batch_size", "4", "--dropout_prob", "0.1"),
    *("--training.optimizer.learning_rate.function", "constant", "--learning_rate", "1e-3"),
    *("--training.optimizer.learning_rate.warmup_proportion", "0"),
)
COMPARED = ("loss", "grad_norm", "learning_rate")
START, END = 600.0, 180.0  # seconds for a run to begin, and to end
FILES, CONNECTIONS = 256, 320  # that the run may open; idle ones to its metrics port
FULL = 4096  # bytes after which each file fails on a full disk
USER_ERROR = 2


class RunsDifferError(UserError):
    """Raised if the interrupted run differs from the uninterrupted one, or ends incorrectly."""


@dataclass
class SoakTest:
    """Soak test in progress: the interrupted run, counts of its interruptions, and its metrics.

    Attributes:
        folder: folder of all files.
        chance: random generator that draws the interruptions.
        counts: number of each kind of interruption.
        rows: metrics of the steps of all processes.
        newest: the last step that is known to be saved.
    """

    folder: Path
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    rows: list[StepMetrics] = field(default_factory=list)
    newest: int = 0
    _start: int = 0

    @property
    def run(self) -> Path:
        """Folder of the interrupted run."""
        return self.folder / "run"

    @property
    def mirror(self) -> Path:
        """Folder of the run's mirror."""
        return self.folder / "mirror"

    # ---- one life -------------------------------------------------------------------------------
    def run_once(self, is_last: bool = False) -> None:
        """Start or resume the run, interrupt it, and check its checkpoints and its output."""
        log, port = self.folder / "life.log", _free_port()
        ends_by = signal.SIGTERM if is_last or self._flip_coin() else signal.SIGKILL
        flags = ("--steps", "1000000", "--checkpoint.steps", "3", "--to_keep", "3", "--save",
                 str(self.run), "--checkpoint.mirror", f"file://{self.mirror}", "--metrics.port",
                 str(port))  # fmt: skip
        can_fail = mirror_died = False
        with _start_run(self.folder, flags, log) as process, ExitStack() as stack:
            _wait_for_step(process, log)
            if not is_last:
                if self._draw_event("idle_connections"):
                    _open_connections(port, stack)
                if mirror_died := self._draw_event("dead_mirrors"):
                    stack.enter_context(self._broken_mirror())
                if can_fail := self._draw_event("full_disks"):
                    self._fill_disk(process)
            time.sleep(self.chance.uniform(0.0, 4.0))
            self._update_newest()
            process.send_signal(ends_by)
            code = _wait_for_exit(process, log)
        self.counts["lives"] += 1
        self.counts[ends_by.name] += 1
        text = log.read_text(errors="replace")
        codes = {-9 if ends_by == signal.SIGKILL else 143} | ({USER_ERROR} if can_fail else set())
        if code not in codes or "Traceback" in text:
            raise RunsDifferError(f"a life ended with code {code}, not {codes}: {text[-3000:]}")
        self._check(text)
        complete = ends_by == signal.SIGTERM and not (can_fail or mirror_died or is_last)
        if complete and self._draw_event("lost_folders"):
            shutil.rmtree(self.run)

    def _flip_coin(self) -> bool:
        return self.chance.random() < 0.5

    def _draw_event(self, event: str) -> bool:
        """Draw whether a random interruption happens, and count it."""
        happens = self._flip_coin()
        self.counts[event] += happens
        return happens

    @contextmanager
    def _broken_mirror(self) -> Iterator[None]:
        """A context in which uploads to the mirror fail, because its folder is a file."""
        away = self.mirror.with_name("mirror.away")
        self.mirror.rename(away)
        self.mirror.write_text("")
        try:
            yield
        finally:
            self.mirror.unlink()
            away.rename(self.mirror)

    def _fill_disk(self, process: subprocess.Popen[bytes]) -> None:
        """Limit the file size of a process for a while, or until it ends."""
        before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (FULL, -1))
        time.sleep(self.chance.uniform(0.5, 6.0))
        if self._flip_coin() and process.poll() is None:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)

    def _update_newest(self) -> None:
        saved = list_step_folders(self.run)
        self.newest = max(self.newest, saved[0].step if saved else 0)

    def _check(self, text: str) -> None:
        """Check the output of a finished training process, and the newest checkpoint on disk."""
        wrong_start = self.rows and f"starting from step {self._start}" not in text
        if wrong_start:
            raise RunsDifferError(f"a life did not start from step {self._start}: {text[:2000]}")
        before = self.newest
        self._update_newest()
        checkpoint = load_checkpoint(self.run)
        if checkpoint.step < before or checkpoint.step != self.newest:
            raise RunsDifferError(
                f"step {before} was saved, but step {checkpoint.step} is the newest"
            )
        self.rows += _training_metrics(self.run)
        self._start = self.newest

    # ---- the run that nobody disturbs -----------------------------------------------------------
    def compare(self) -> int:
        """Train without interruption and compare metrics; returns the number of compared steps."""
        whole, log = self.folder / "whole", self.folder / "whole.log"
        with _start_run(
            self.folder, ("--steps", str(self.newest), "--save", str(whole)), log
        ) as run:
            code = run.wait()
        if code:
            raise RunsDifferError(f"the run that nobody disturbs ended with code {code}")
        rows = {row["step"]: row for row in _training_metrics(whole)}
        for row in self.rows:
            for name in COMPARED:
                if row["step"] <= self.newest and row[name] != rows[row["step"]][name]:
                    raise RunsDifferError(f"{name} of step {row['step']} differs")
        brought = self.folder / "brought"
        RemoteRun(f"file://{self.mirror}").download_newest(brought)
        expected = digest_tensors(whole)
        for run_folder in (self.run, brought):
            if digest_tensors(run_folder) != expected:
                raise RunsDifferError(f"the last step in {run_folder} differs")
        return len(self.rows)


def _training_metrics(run: Path) -> list[StepMetrics]:
    """Returns the metrics of a run's training steps, without the row of the final save."""
    return [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def digest_tensors(run: Path) -> str:
    """Returns a SHA-256 (hex) of all tensors in the newest checkpoint."""
    checkpoint, digest = load_checkpoint(run), hashlib.sha256()
    digest.update(str(checkpoint.step).encode())
    for name in sorted(checkpoint.tensors):
        array = checkpoint.tensors[name]
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


# ---- processes ----------------------------------------------------------------------------------
@contextmanager
def _start_run(folder: Path, flags: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a training process; kills it if it is still running when the context ends."""
    env = {**os.environ, "POPXL_CACHE_DIR": str(folder / "executables")}
    command = [sys.executable, "run_finetuning.py", *FLAGS, *flags]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=errors
        ) as process,
    ):
        hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (FILES, hard))
        try:
            yield process
        finally:
            process.kill()


def _wait_for_step(process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START
    while b"\nstep " not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > end:
            raise RunsDifferError(
                f"a life did not begin: {log.read_text(errors='replace')[-3000:]}"
            )
        time.sleep(0.05)


def _wait_for_exit(process: subprocess.Popen[bytes], log: Path) -> int:
    try:
        return process.wait(END)
    except subprocess.TimeoutExpired:
        text = log.read_text(errors="replace")[-3000:]
        raise RunsDifferError(f"a life did not end within {END:.0f} s: {text}") from None


def _open_connections(port: int, stack: ExitStack) -> None:
    """Open idle TCP connections to the metrics port."""
    for _ in range(CONNECTIONS):
        stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_soak_test(folder: Path, minutes: float, seed: int) -> dict[str, Any]:
    """Interrupt a run for `minutes`, and compare it with an uninterrupted one.

    Raises:
        RunsDifferError: something was lost, or the run did not end as it must.
    """
    soak_run, start_time = SoakTest(folder, random.Random(seed)), time.monotonic()
    while time.monotonic() - start_time < 60 * minutes:
        soak_run.run_once()
        print(dict(soak_run.counts), "newest step", soak_run.newest, file=sys.stderr, flush=True)
    soak_run.run_once(is_last=True)
    disturbed = time.monotonic() - start_time
    rows = soak_run.compare()
    return {
        **soak_run.counts,
        "steps": soak_run.newest,
        "rows_compared": rows,
        "disturbed_minutes": round(disturbed / 60, 1),
        "lost": 0,
    }


@entry_point(single_process=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the soak test, print its counts and add a line to the record."""
    parser = Parser.of_script(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of disturbances (30)")
    parser.add_argument("--folder", required=True, type=Path, help="an empty one, of a local disk")
    parser.add_argument("--seed", type=int, default=0, help="of what happens (0)")
    parser.add_argument("--record", type=Path, help="file that the line of JSON is added to")
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    if any(args.folder.iterdir()):
        raise UserError(f"--folder {args.folder} is not empty: name a new one")
    counts_by_event = run_soak_test(args.folder.absolute(), args.minutes, args.seed)
    command = (
        f"python3 -m benchmarks.soak --minutes {args.minutes:g} --seed {args.seed} --folder DIR"
    )
    append_record({"command": command, **counts_by_event}, args.record)


if __name__ == "__main__":
    sys.exit(main())
