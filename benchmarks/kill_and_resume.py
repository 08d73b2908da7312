"""Save, kill, resume and export the training of a model that is larger than memory.

    python3 -m benchmarks.kill_and_resume xl --folder /scratch/mine --record records.json

On generated data, in processes of their own, each of which keeps its state on disk:

1. trains two steps; saves the first one, and is killed while it saves the second;
2. continues from what is whole, the first step, and trains the second again: loss and norm of the
   gradients must be the same;
3. exports the first step for Hugging Face;
4. transformers makes the model without memory (torch's meta device); each of its tensors is read
   from the export and compared with the checkpoint's.

Each process has a hard limit of memory, a tenth above what it may plan. Adds a line of JSON to the
record: seconds and memory of each process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.disk_offload import append_record, build_config, parse_arguments
from checkpoints import CheckpointStore, load_checkpoint
from config.errors import UserError
from config.sections import RunConfig
from data.loader import Loader
from data.samples import Batch
from modelling.model_family import get_family
from run.checkpoint_manager import DISK_SHARD_BYTES
from run.records.throughput import peak_host_bytes
from run.resume import resolve_initial_state
from sessions.training import TrainingSession
from terminal.entry_point import entry_point
from terminal.huge_pages import with_huge_pages

_ROOTS = (  # of control groups: the folder, and the file with the limit
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)
_STACKS = 2**30  # bytes that threads map and never touch


@contextmanager
def limit_memory(nbytes: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """A context with a memory limit; yields the kind of limit, and a function for child processes.

    In a control group all those processes together have so many bytes; what is resident counts, the
    page cache among it as far as the kernel cannot drop it. Without one, each has so many, and a
    gigabyte for the stacks of threads: its private memory counts, touched or not (RLIMIT_DATA).
    """
    group = _create_cgroup(nbytes)
    if group is None:
        limit = nbytes + _STACKS
        yield "RLIMIT_DATA", lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return
    procs = group / "cgroup.procs"
    try:
        yield "a control group", lambda: _join_cgroup(procs)
    finally:
        with suppress(OSError):  # a process that was killed may be going yet
            group.rmdir()


def _create_cgroup(nbytes: int) -> Path | None:
    """Create a Linux control group with a memory limit; returns None where that is impossible."""
    for root, file in _ROOTS:
        group = root / f"popxl-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(nbytes))
        except OSError:
            group.rmdir()
            continue
        return group
    return None


def _join_cgroup(procs: Path) -> None:
    """Move this process into a control group of Linux (cgroup)."""
    procs.write_text(str(os.getpid()))


RUNS: Mapping[str, tuple[str, float]] = {"base": ("base_adamw", 2.5), "xl": ("xl_adamw", 16.0)}
"""By name: one of `benchmarks.disk_offload.RUNS`, and gigabytes of memory."""

_SAVED = 2**26  # bytes of the second step that are written before the kill


@dataclass(frozen=True)
class MeasurementFolders:
    """Folders of one kill-and-resume measurement: offloaded state, checkpoints and export."""

    root: Path

    @property
    def disk(self) -> str:
        """Folder of the training state that is offloaded to disk."""
        return str(self.root / "disk")

    @property
    def run(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.root / "run"

    @property
    def export(self) -> Path:
        """Folder of the exported Hugging Face model."""
        return self.root / "export"


# ---- the processes ------------------------------------------------------------------------------
def train_and_save(config: RunConfig, folders: MeasurementFolders) -> None:
    """Train two steps and save a checkpoint of each."""
    family = get_family(config)
    model, batches = TrainingSession(config), _global_batches(config)
    store = CheckpointStore(folders.run, shard_bytes=DISK_SHARD_BYTES)
    model.write(family.weight_map(config).init_weights(config.model.seed))
    with model:
        for step in (1, 2):
            _train_step(model, next(batches), step)
            _print_json(saving=step)
            store.save(step, model.tensors(), {}, wait=True)
            _print_json(saved=step, peak=peak_host_bytes())


def resume_training(config: RunConfig, folders: MeasurementFolders) -> None:
    """Resume training from the first step's checkpoint, and train the second step."""
    family, batches = get_family(config), _global_batches(config)
    model = TrainingSession(config)
    start = resolve_initial_state(config, family.weight_map(config))
    _print_json(loaded=start.step)
    model.write(start.tensors)
    with model:
        next(batches)
        _train_step(model, next(batches), start.step + 1)


def export_to_hf(config: RunConfig, folders: MeasurementFolders) -> None:
    """Export the checkpoint's weights to a Hugging Face model folder."""
    from huggingface.model_folders import write_hf_directory
    from modelling.weights import without_optimizer_state

    family = get_family(config)
    weights = without_optimizer_state(load_checkpoint(folders.run).tensors)
    files = family.weight_map(config).to_hf(weights)
    write_hf_directory(folders.export, files, family.to_config_json(config), DISK_SHARD_BYTES)
    _print_json(peak=peak_host_bytes())


def compare_export(config: RunConfig, folders: MeasurementFolders) -> None:
    """Compare each exported tensor with transformers' model (shape) and the checkpoint (values)."""
    import torch
    import transformers

    from huggingface.model_folders import read_hf_directory

    hf_config = transformers.AutoConfig.from_pretrained(folders.export)
    with torch.device("meta"):
        model = getattr(transformers, hf_config.architectures[0])(hf_config)
    exported, family = read_hf_directory(folders.export), get_family(config)
    saved = load_checkpoint(folders.run).tensors
    logical = family.weight_map(config).from_hf(exported)
    state = model.state_dict()
    missing = [name for name in state if name not in exported and not _is_tied(name, model)]
    unknown = [name for name in exported if name not in state]
    wrong = [n for n in exported if n in state and tuple(state[n].shape) != exported.spec(n).shape]
    unequal = [n for n in logical if not _same_bits(logical[n], saved[n])]
    _print_json(
        tensors=len(exported),
        wrong=[*missing, *unknown, *wrong, *unequal],
        peak=peak_host_bytes(),
    )


def _is_tied(name: str, model: Any) -> bool:
    return name in (getattr(model, "_tied_weights_keys", None) or ())


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and bool(
        np.array_equal(np.ravel(a).view(np.uint8), np.ravel(b).view(np.uint8))
    )


CHILDREN = {
    "train": train_and_save,
    "resume": resume_training,
    "export": export_to_hf,
    "read_back": compare_export,
}


def _global_batches(config: RunConfig) -> Iterator[list[Batch]]:
    """Yield the global batches that each run of the training program reads."""
    samples = get_family(config).sample_format.make_random_samples(
        config, 4 * config.training.global_batch_size, None
    )
    loader = Loader.from_config(config, samples)
    while True:
        yield [loader.next_batch() for _ in range(config.execution.device_iterations)]


def _train_step(model: TrainingSession, batches: Sequence[Batch], step: int) -> None:
    (result,) = model.run(batches, [1e-4], step - 1)
    _print_json(
        step=step, loss=result.loss.hex(), norm=result.grad_norm.hex(), peak=peak_host_bytes()
    )


def _print_json(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


# ---- the parent ---------------------------------------------------------------------------------
def measure(name: str, folders: MeasurementFolders) -> dict[str, Any]:
    """Run the child processes that save, resume and export, in turn; returns their metrics.

    Raises:
        UserError: one failed, or what must be equal is not.
    """
    limit = round(1.1e9 * RUNS[name][1])
    with limit_memory(limit) as (limit_kind, preexec):
        return {"limit": limit_kind, "limit_bytes": limit} | _measure_children(
            name, folders, preexec
        )


def _measure_children(
    name: str, folders: MeasurementFolders, preexec: Callable[[], None]
) -> dict[str, Any]:
    train_lines = list(_run_child(name, "train", folders, preexec, kills=True))
    steps = [fields for fields in train_lines if "loss" in fields]
    later_lines = {
        child: list(_run_child(name, child, folders, preexec)) for child in list(CHILDREN)[1:]
    }
    (resumed,) = [f for f in later_lines["resume"] if "loss" in f]
    same = all(resumed[k] == steps[-1][k] for k in ("step", "loss", "norm"))
    (back,) = [f for f in later_lines["read_back"] if "tensors" in f]
    if not same or back["wrong"]:
        raise UserError(f"not equal: {steps[-1]}, {resumed}, {back['wrong'][:3]}")
    peaks = {"train": train_lines, **later_lines}
    return {
        "loss": float.fromhex(resumed["loss"]),
        "tensors_read_back": back["tensors"],
        "peak_host_bytes": {
            c: max(f.get("peak", 0) for f in fields) for c, fields in peaks.items()
        },
        "seconds": {c: fields[-1]["seconds"] for c, fields in peaks.items()},
    }


def _run_child(
    run_name: str,
    child_name: str,
    folders: MeasurementFolders,
    preexec: Callable[[], None],
    kills: bool = False,
) -> Iterator[dict[str, Any]]:
    """Run a child process; yields the JSON lines that it prints, at last one with its seconds.

    Args:
        preexec: called first in the child.
        kills: True to kill it while it saves the second step.
    """
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.kill_and_resume", run_name, "--child", child_name,
               "--folder", str(folders.root)]  # fmt: skip
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=with_huge_pages(os.environ),
        preexec_fn=preexec,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(child_name, line, end="", file=sys.stderr, flush=True)
            if not line.startswith("{"):
                continue
            fields = json.loads(line)
            yield fields
            if kills and fields.get("saving") == 2:
                _wait_for_partial_save(folders.run, process)
                process.kill()
    if process.returncode != (-signal.SIGKILL if kills else 0):
        raise UserError(f"{child_name} ended with code {process.returncode}: {' '.join(command)}")
    yield {"seconds": time.perf_counter() - start}


def _wait_for_partial_save(run: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a child process has written a part of a new checkpoint."""
    before = _folder_bytes(run)
    while _folder_bytes(run) < before + _SAVED and process.poll() is None:
        time.sleep(0.01)


def _folder_bytes(folder: Path) -> int:
    nbytes = 0
    for path in folder.rglob("*"):
        try:
            nbytes += path.stat().st_size
        except OSError:  # renamed meanwhile
            continue
    return nbytes


@entry_point(single_process=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure kill and resume of a preset, print the metrics, and add them to the record file."""
    args = parse_arguments(__doc__, RUNS, CHILDREN, arguments)
    folders = MeasurementFolders(args.folder)
    if args.child:
        run, memory = RUNS[args.run]
        config = build_config(run, folders.disk, memory, save=str(folders.run))
        CHILDREN[args.child](config, folders)
        return
    if folders.run.exists() or folders.export.exists():
        raise UserError(f"--folder {folders.root} is not empty: name a new one")
    fields = measure(args.run, folders)
    command = f"python3 -m benchmarks.kill_and_resume {args.run} --folder DIR"
    append_record({"command": command, "host_memory": RUNS[args.run][1], **fields}, args.record)


if __name__ == "__main__":
    sys.exit(main())
