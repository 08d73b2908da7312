"""A directory of checkpoints: saves in the background, loads the newest good one.

Several processes save and load together. Each writes files of its own into the folder of the step;
process 0 makes that folder, and commits it when the others have said that theirs are on the disk.
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
from checkpoints.collective_io import on_all_processes, reason_of, save_with_retries
from checkpoints.errors import CheckpointError, CheckpointWarning
from checkpoints.loading import Checkpoint, known_as_damaged, load_newest
from checkpoints.manifest import Manifest
from checkpoints.safetensors_files import digest_of_bytes, shards_of, write_shard
from checkpoints.sharded_files import ShardAssigner, own_share
from checkpoints.step_folders import (
    next_name,
    remove_leftovers,
    remove_older,
    step_draft,
    step_folders,
)
from checkpoints.tensor_files import Records, TensorRecord, readers, write_records
from checkpoints.tensor_shards import ShardSource
from files.atomic_writing import write_synced
from files.formatting import format_bytes, format_path

SHARD_BYTES = 2**30


class Saved(NamedTuple):
    """A step that is on disk.

    Attributes:
        path: its folder; process 0 alone knows it.
        seconds: from the call of `save` on.
        time: when it was complete, in seconds since 1970.
    """

    step: int
    path: Path | None
    seconds: float
    time: float


class CheckpointStore:
    """Saves and loads the steps of one run. One run at a time may save in a directory.

    Of all stores of a process one saves at a time, so that several processes, which save in the
    same order, always meet over the same step.
    """

    _latest: ClassVar[Future[None] | None] = None
    """The last save that was begun in the background, of whichever store."""

    def __init__(
        self, directory: str | Path, to_keep: int | None = None, shard_bytes: int = SHARD_BYTES
    ) -> None:
        """Name the directory; nothing is created or read yet.

        Args:
            directory: where the steps' folders are.
            to_keep: newest steps to keep; older ones are deleted after a save. None: all.
            shard_bytes: size of a safetensors file; larger only if a tensor is.
        """
        if to_keep is not None and to_keep < 1:
            raise ValueError(f"to_keep is {to_keep}, but must be at least 1")
        self._directory = Path(directory)
        self._to_keep = to_keep
        self._channel = f"checkpoint/{self._directory.name}"
        self._shard_bytes = shard_bytes
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._damaged: set[Path] = set()
        self._has_saved = False
        self._shares = ShardAssigner()
        self.saved: Saved | None = None
        """The last step that this wrote; the thread that writes sets it."""
        self._written: Path | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, np.ndarray],
        metadata: Mapping[str, Any],
        wait: bool = False,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Save a step, as the newest.

        A save that still runs is waited for first, also one of another store, so that at most one
        copy exists. Several processes save together: each writes what it holds of a `ShardSource`,
        else its share of the tensors, all of which it can read.

        Args:
            step: optimizer steps done.
            tensors: arrays by name. Any name will do.
            metadata: a small record of anything JSON can hold.
            wait: False copies all tensors and returns; the copy is written in the background.
                True returns when the step is on disk, and copies nothing: a mapping that makes
                each array on access needs memory for one safetensors file only.
            texts: text files to store with the tensors, by name, such as config.yml.

        A write that fails is tried again (`save_with_retries`).

        Raises:
            CheckpointError: if this save, or with `wait=False` the one before, cannot be written.
                Older checkpoints are intact then.
            TypeError, ValueError: if tensors or metadata are of a kind that cannot be saved.
        """
        begun = time.monotonic()
        if CheckpointStore._latest is not None:
            futures.wait([CheckpointStore._latest])
        self.wait()
        record: dict[str, Any] = json.loads(json.dumps(dict(metadata)))
        manifest = Manifest(step, record, texts=dict(texts or {}))
        if popdist.getNumInstances() > 1 and isinstance(tensors, ShardSource):
            shares = self._shares.of(tensors)
            manifest = replace(manifest, cut=shares.cut)
            own, is_copy = shares.arrays, True
        else:
            own, is_copy = partial(own_share, tensors), False
        if wait:
            self._write(manifest, own, begun)
            return
        copies = {name: array if is_copy else array.copy() for name, array in own()}
        self._pending = self._writer.submit(self._write, manifest, copies.items, begun)
        CheckpointStore._latest = self._pending

    def check_space(self, step: int | None, needed: int) -> None:
        """Check that the disk has room for a step.

        Args:
            step: that is to be saved; None: the first of a run, for which too little room for
                `to_keep` of them, and the one being written, is a warning.
            needed: bytes of its tensors.

        Raises:
            CheckpointError: it has not.
        """
        folder = self._directory
        free = shutil.disk_usage(folder).free
        what = "a step" if step is None else f"step {step}"
        if free < needed:
            raise CheckpointError(
                f"cannot save {what} in {format_path(folder)}: it needs {format_bytes(needed)}, "
                f"and {format_bytes(free)} are free: make room, or save elsewhere"
            )
        own = sum(f.stat().st_size for old in step_folders(folder) for f in old.path.iterdir())
        if step is None and self._to_keep and free + own < (self._to_keep + 1) * needed:
            warnings.warn(
                f"{format_path(folder)} has room for {(free + own) // needed} steps of "
                f"{format_bytes(needed)}, but {self._to_keep} are kept while one is written: lower "
                "--checkpoint.to_keep, or make room",
                CheckpointWarning,
                stacklevel=2,
            )

    @property
    def has_failed(self) -> bool:
        """Whether the last save is over, in the background, and could not be written."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is not None

    def wait(self) -> None:
        """Return when nothing is being saved.

        Raises:
            CheckpointError: if the save that was waited for could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(self, step: int | None = None, verify: bool = True) -> Checkpoint:
        """The newest good step, or the `step` asked for; see `checkpoints.loading.load_newest`."""
        self.wait()
        checkpoint, damaged = load_newest(self._directory, step, verify)
        self._damaged |= damaged
        return checkpoint

    def steps(self) -> list[int]:
        """Steps in the directory, the newest last, good or damaged."""
        return [folder.step for folder in reversed(step_folders(self._directory))]

    def close(self) -> None:
        """Wait for the last save. The store can load afterwards, but no longer save.

        Raises:
            CheckpointError: if that save could not be written.
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
        begun: float,
    ) -> None:
        """Write a step; try again where that fails.

        Args:
            manifest: without records of the tensors, and with the texts themselves.
            tensors: gives what this process stores.
            begun: when the save began, by the monotonic clock.
        """
        what = f"cannot save step {manifest.step} in {format_path(self._directory)}"
        save_with_retries(lambda: self._write_once(manifest, tensors()), what)
        seconds = time.monotonic() - begun
        self.saved = Saved(manifest.step, self._written, seconds, time.time())
        if self._to_keep is not None and popdist.getInstanceIndex() == 0:
            self._remove_older(self._to_keep)

    def _remove_older(self, to_keep: int) -> None:
        """The step is saved by now: what fails here is told, and no failure of the save."""
        try:
            remove_older(self._directory, to_keep, self._damaged | known_as_damaged())
        except (OSError, CheckpointError) as error:
            what = f"cannot look for older steps in {format_path(self._directory)}"
            warnings.warn(f"{what}: {reason_of(error)}", CheckpointWarning, stacklevel=2)

    def _write_once(self, manifest: Manifest, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Write a step, or raise on all processes."""
        if popdist.getInstanceIndex():
            self._write_share(Path(on_all_processes(lambda: "", self._channel)[0]), tensors)
            on_all_processes(lambda: "", self._channel)
            return
        with ExitStack() as stack:

            def begin() -> str:
                name = self._begin(manifest.step)
                self._written = self._directory / name
                return str(stack.enter_context(step_draft(self._directory, name)))

            folder = Path(on_all_processes(begin, self._channel)[0])
            records, tables = self._write_share(folder, tensors)

            def commit() -> None:
                for name, text in manifest.texts.items():
                    write_synced(folder / name, text)
                digests = {n: digest_of_bytes(text.encode()) for n, text in manifest.texts.items()}
                replace(manifest, tensors=records, texts=digests, tables=tables).write(folder)
                Manifest.read(folder).open(folder)  # what could not be read is no step
                stack.close()

            on_all_processes(commit, self._channel)

    def _begin(self, step: int) -> str:
        """Make the directory; returns the name of the step's folder."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if not self._has_saved:
            remove_leftovers(self._directory)
            self._has_saved = True
        return next_name(self._directory, step)

    def _write_share(
        self, folder: Path, tensors: Iterable[tuple[str, np.ndarray]]
    ) -> tuple[Records, dict[str, str]]:
        """Write the tensors of this process.

        Returns:
            Their records, and no tables, if it is alone; else the tables of all processes.
        """
        if popdist.getNumInstances() == 1:
            return write_tensors(folder, "tensors-", tensors, self._shard_bytes), {}
        prefix = f"tensors-{popdist.getInstanceIndex():05d}"

        def written() -> list[str]:
            records = write_tensors(folder, f"{prefix}-", tensors, self._shard_bytes)
            return [f"{prefix}.json", write_records(folder / f"{prefix}.json", records)]

        return {}, dict(on_all_processes(written, self._channel))


def write_tensors(
    folder: Path, prefix: str, tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int
) -> Records:
    """Write tensors to files of a step, whose names begin with `prefix`; returns their records.

    Raises:
        OSError: they cannot be written.
    """
    records: Records = {}
    with readers() as pool:
        for number, shard in enumerate(shards_of(tensors, shard_bytes), 1):
            file = f"{prefix}{number:05d}.safetensors"
            digested = pool.map(lambda array, f=file: TensorRecord.of(array, f), shard.values())
            write_shard(folder / file, shard)  # while the digests are computed
            records |= zip(shard, digested, strict=True)
    return records
