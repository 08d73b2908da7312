"""Checkpoint directory of a run: background saves, and loads of the newest undamaged step.

All processes save and load together. Each writes its own files into the step's folder; process 0
creates the folder, and commits it when all processes have written theirs.
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

import popdist
from checkpoints.collective_io import error_reason, run_on_all_processes, save_with_retries
from checkpoints.errors import CheckpointError, CheckpointWarning
from checkpoints.manifest import Manifest
from checkpoints.safetensors_files import sha256_of_bytes, split_by_bytes, write_safetensors
from checkpoints.shard_assignment import ShardAssigner, iter_local_tensors
from checkpoints.step_folders import (
    list_step_folders,
    next_folder_name,
    remove_older_steps,
    remove_partial_steps,
    tmp_step_folder,
)
from checkpoints.tensor_files import TensorRecord, TensorRecords, get_reader_pool, write_records
from checkpoints.tensor_shards import ShardSource
from checkpoints.verified_loading import SavedCheckpoint, get_damaged_folders, load_newest
from files.atomic_writing import write_synced
from files.formatting import format_bytes, format_path

SHARD_BYTES = 2**30
"""Default maximum size of a safetensors file."""


class SaveResult(NamedTuple):
    """Step, folder, duration and end time of a completed save of a checkpoint.

    Attributes:
        path: the step's folder on process 0; None on other processes.
        seconds: duration, from the call of `save`.
        time: completion time, in seconds since 1970.
    """

    step: int
    path: Path | None
    seconds: float
    time: float


class CheckpointStore:
    """Saves and loads a run's checkpoints; only one run at a time can save to a directory.

    Only one store of a process saves at a time: all processes save in the same order, so they
    always synchronize on the same step.
    """

    _latest: ClassVar[Future[None] | None] = None
    """The last background save of any store."""

    def __init__(
        self, directory: str | Path, to_keep: int | None = None, shard_bytes: int = SHARD_BYTES
    ) -> None:
        """Create a store; the directory is created by the first save.

        Args:
            directory: parent of the step folders.
            to_keep: number of newest steps to keep; a save deletes older ones. None: keep all.
            shard_bytes: maximum size of a safetensors file; a larger tensor has a file of its own.
        """
        if to_keep is not None and to_keep < 1:
            raise ValueError(f"to_keep is {to_keep}, but must be at least 1")
        self._directory = Path(directory)
        self._to_keep = to_keep
        self._channel = f"checkpoint/{self._directory.name}"
        self.shard_bytes = shard_bytes
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._damaged: set[Path] = set()
        self._has_saved = False
        self._shard_assigner = ShardAssigner()
        self.last_save: SaveResult | None = None
        """The last completed save; set by the writer thread."""
        self._step_folder: Path | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, np.ndarray],
        metadata: Mapping[str, Any],
        wait: bool = False,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Save the tensors and metadata of a step as the newest checkpoint; collective.

        Waits for the save before, also one of another store, so that at most one copy exists. Each
        process writes its shards of a `ShardSource`; of other mappings, which every process can
        read in full, the tensors that are assigned to it. A failed write is retried
        (`save_with_retries`).

        Args:
            step: number of optimizer steps done.
            tensors: arrays by name.
            metadata: small JSON value.
            wait: False copies all tensors and returns; the copy is written in the background. True
                returns when the step is on disk, without a copy: a lazy mapping then needs memory
                for one safetensors file only.
            texts: text files to store with the tensors, by name, such as config.yml.

        Raises:
            CheckpointError: this save, or with `wait=False` the save before, cannot be written.
                Older steps are intact.
            TypeError, ValueError: tensors or metadata of an unsupported type.
        """
        start = time.monotonic()
        if CheckpointStore._latest is not None:
            futures.wait([CheckpointStore._latest])
        self.wait()
        json_metadata = json.loads(json.dumps(dict(metadata)))
        manifest = Manifest(step, json_metadata, texts=dict(texts or {}))
        if popdist.getNumInstances() > 1 and isinstance(tensors, ShardSource):
            assignment = self._shard_assigner.assign_shards(tensors)
            manifest = replace(manifest, sharded=assignment.sharded)
            local_tensors, is_copy = assignment.local_arrays, True
        else:
            local_tensors, is_copy = partial(iter_local_tensors, tensors), False
        if wait:
            self._write(manifest, local_tensors, start)
            return
        copies = {name: array if is_copy else array.copy() for name, array in local_tensors()}
        self._pending = self._writer.submit(self._write, manifest, copies.items, start)
        CheckpointStore._latest = self._pending

    def check_disk_space(self, step: int | None, needed_bytes: int) -> None:
        """Check that the disk has enough free bytes for one more checkpoint.

        Args:
            step: the step to save; None before the first save of a run: then too little space for
                `to_keep` steps and the one being written is a warning.
            needed_bytes: bytes of the step's tensors.

        Raises:
            CheckpointError: the disk has too little free space for one step.
        """
        folder = self._directory
        free = shutil.disk_usage(folder).free
        step_name = "a step" if step is None else f"step {step}"
        if free < needed_bytes:
            raise CheckpointError(
                f"cannot save {step_name} in {format_path(folder)}: it needs "
                f"{format_bytes(needed_bytes)}, and {format_bytes(free)} are free: make room, or "
                "save elsewhere"
            )
        used = sum(
            f.stat().st_size for old in list_step_folders(folder) for f in old.path.iterdir()
        )
        if step is None and self._to_keep and free + used < (self._to_keep + 1) * needed_bytes:
            warnings.warn(
                f"{format_path(folder)} has room for {(free + used) // needed_bytes} steps of "
                f"{format_bytes(needed_bytes)}, but {self._to_keep} are kept while one is written: "
                "lower --checkpoint.to_keep, or make room",
                CheckpointWarning,
                stacklevel=2,
            )

    @property
    def last_save_failed(self) -> bool:
        """True if the last background save has ended with an error."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def wait(self) -> None:
        """Wait for the end of the background save.

        Raises:
            CheckpointError: that save could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(self, step: int | None = None, verify: bool = True) -> SavedCheckpoint:
        """Load the newest undamaged step, or the given one; waits for a background save first."""
        self.wait()
        checkpoint, damaged = load_newest(self._directory, step, verify)
        self._damaged |= damaged
        return checkpoint

    def steps(self) -> list[int]:
        """Return the numbers of the saved steps, newest last; damaged steps are included."""
        return [folder.step for folder in reversed(list_step_folders(self._directory))]

    def close(self) -> None:
        """Wait for the background save to end; afterwards the store cannot save, but can load.

        Raises:
            CheckpointError: that save could not be written.
        """
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write(
        self,
        manifest: Manifest,
        tensors: Callable[[], Iterable[tuple[str, np.ndarray]]],
        start: float,
    ) -> None:
        """Write a checkpoint in the background or foreground, retrying failed writes.

        Args:
            manifest: without tensor records, and with the content of the text files.
            tensors: returns the (name, array) pairs that this process stores.
            start: start of the save, in seconds of the monotonic clock.
        """
        failure = f"cannot save step {manifest.step} in {format_path(self._directory)}"
        save_with_retries(lambda: self._write_once(manifest, tensors()), failure)
        seconds = time.monotonic() - start
        self.last_save = SaveResult(manifest.step, self._step_folder, seconds, time.time())
        if self._to_keep is not None and popdist.getInstanceIndex() == 0:
            self._remove_older_steps(self._to_keep)

    def _remove_older_steps(self, to_keep: int) -> None:
        """Delete older saved steps; a failure is only a warning, as the new step is saved."""
        try:
            remove_older_steps(self._directory, to_keep, self._damaged | get_damaged_folders())
        except (OSError, CheckpointError) as error:
            failure = f"cannot look for older steps in {format_path(self._directory)}"
            warnings.warn(f"{failure}: {error_reason(error)}", CheckpointWarning, stacklevel=2)

    def _write_once(self, manifest: Manifest, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Try once to write a checkpoint; succeeds on all processes or raises on all."""
        if popdist.getInstanceIndex():
            folder = Path(run_on_all_processes(lambda: "", self._channel)[0])
            self._write_local_tensors(folder, tensors)
            run_on_all_processes(lambda: "", self._channel)
            return
        with ExitStack() as stack:

            def create_folder() -> str:
                name = self._next_folder_name(manifest.step)
                self._step_folder = self._directory / name
                return str(stack.enter_context(tmp_step_folder(self._directory, name)))

            folder = Path(run_on_all_processes(create_folder, self._channel)[0])
            records, record_files = self._write_local_tensors(folder, tensors)

            def commit() -> None:
                for name, text in manifest.texts.items():
                    write_synced(folder / name, text)
                digests = {n: sha256_of_bytes(text.encode()) for n, text in manifest.texts.items()}
                replace(manifest, tensors=records, texts=digests, record_files=record_files).write(
                    folder
                )
                Manifest.read(folder).open_tensor_files(
                    folder
                )  # a step that cannot be read is not committed
                stack.close()

            run_on_all_processes(commit, self._channel)

    def _next_folder_name(self, step: int) -> str:
        """Create the checkpoint directory and return an unused folder name for a step."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if not self._has_saved:
            remove_partial_steps(self._directory)
            self._has_saved = True
        return next_folder_name(self._directory, step)

    def _write_local_tensors(
        self, folder: Path, tensors: Iterable[tuple[str, np.ndarray]]
    ) -> tuple[TensorRecords, dict[str, str]]:
        """Write the tensors that this process stores; returns their manifest records and hashes.

        Returns:
            Tensor records, and the digests of all processes' record files by name. Of these two, a
            single process has only records, and several processes have only record files.
        """
        if popdist.getNumInstances() == 1:
            return write_tensors(folder, "tensors-", tensors, self.shard_bytes), {}
        prefix = f"tensors-{popdist.getInstanceIndex():05d}"

        def write() -> list[str]:
            records = write_tensors(folder, f"{prefix}-", tensors, self.shard_bytes)
            return [f"{prefix}.json", write_records(folder / f"{prefix}.json", records)]

        return {}, dict(run_on_all_processes(write, self._channel))


def write_tensors(
    folder: Path, prefix: str, tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int
) -> TensorRecords:
    """Write tensors to safetensors files `<prefix><number>`; returns a manifest record of each.

    Raises:
        OSError: a file cannot be written.
    """
    records: TensorRecords = {}
    with get_reader_pool() as pool:
        for number, shard in enumerate(split_by_bytes(tensors, shard_bytes), 1):
            file = f"{prefix}{number:05d}.safetensors"
            shard_records = pool.map(
                lambda array, f=file: TensorRecord.from_array(array, f), shard.values()
            )
            write_safetensors(folder / file, shard)  # while the digests are computed
            records |= zip(shard, shard_records, strict=True)
    return records
