"""A directory of checkpoints: saves in the background, loads the newest good one.

Several processes save and load together. Each writes files of its own into the folder of the step;
process 0 makes that folder, and commits it when the others have said that theirs are on the disk.
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

import popdist
from checkpoints.digests import digest_of_bytes
from checkpoints.errors import (
    CheckpointError,
    CheckpointWarning,
    DifferentCopiesError,
    OtherFormatError,
)
from checkpoints.folders import (
    DRAFT,
    StepFolder,
    appears,
    new_step_folder,
    remove_leftovers,
    remove_older,
    step_folders,
)
from checkpoints.manifest import FILE_NAME, Manifest
from checkpoints.parts import ShardSource
from checkpoints.save_retry import save_with_retries
from checkpoints.shards import shards_of, write_shard
from checkpoints.shares import ShardAssigner, own_share
from checkpoints.tables import Records, Table, TensorRecord
from checkpoints.tensor_files import TensorFiles, readers
from checkpoints.together import damage_told, on_all_processes, reason_of
from files.shown import shown_bytes, shown_path
from files.writing import write_synced

SHARD_BYTES = 2**30

_set_aside: dict[Path, str] = {}
"""Folders of steps that were found to be damaged as they were read, and how: this process loads
them no more."""


@dataclass(frozen=True)
class Checkpoint:
    """A saved state, of which everything but the values was verified."""

    step: int
    """Optimizer steps done when it was saved."""

    tensors: TensorFiles
    """Logical tensors by name; each access reads one from disk and verifies it."""

    metadata: dict[str, Any]
    """What was saved with them, as JSON gives it back: tuples have become lists."""

    path: Path
    """Its folder."""

    sha256: str = ""
    """The digest of its manifest, and so of all of it."""

    def verify(self) -> None:
        """Read every value once. Of several processes each reads a share.

        Raises:
            DamagedError: on all processes, about one that is not what was saved.
        """
        with damage_told():
            self.tensors.verify(popdist.getInstanceIndex(), popdist.getNumInstances())

    def set_aside(self, reason: str) -> None:
        """Load it no more in this process, since it turned out to be damaged: `load` then takes the
        step before. All processes do so."""
        _set_aside[self.path.absolute()] = reason


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

        A save that still runs is waited for first, so that at most one copy exists; also one of
        another store. Several
        processes save together: each writes what it holds, if the tensors can be had in parts
        (`checkpoints.parts.ShardSource`), else its share of the tensors, all of which it can read.

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
                f"cannot save {what} in {shown_path(folder)}: it needs {shown_bytes(needed)}, and "
                f"{shown_bytes(free)} are free: make room, or save elsewhere"
            )
        own = sum(f.stat().st_size for old in step_folders(folder) for f in old.path.iterdir())
        if step is None and self._to_keep and free + own < (self._to_keep + 1) * needed:
            warnings.warn(
                f"{shown_path(folder)} has room for {(free + own) // needed} steps of "
                f"{shown_bytes(needed)}, but {self._to_keep} are kept while one is written: lower "
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
        """The newest step whose every byte is as it was saved, or the `step` asked for.

        If a newer step is damaged, a `CheckpointWarning` says which and why.

        Args:
            verify: read all tensors once, in order to verify them. False leaves it to who reads
                them, and sets the step aside if one is damaged (`Checkpoint.set_aside`).

        Raises:
            CheckpointError: if there is no good one, or a later version of this wrote the newest.
        """
        self.wait()
        problems: dict[StepFolder, str] = {}
        while True:
            folders = [f for f in self._everyones_folders() if step is None or f.step == step]
            # What a run that saves meanwhile has deleted is not damaged.
            problems = {folder: problems[folder] for folder in folders if folder in problems}
            folder = next((folder for folder in folders if folder not in problems), None)
            if folder is None:
                raise CheckpointError("; ".join(problems.values()) or self._absent(step))
            try:
                checkpoint = _read(folder.path, verify)
                break
            except (OtherFormatError, DifferentCopiesError):
                raise
            except CheckpointError as error:
                problems[folder] = f"the checkpoint of step {folder.step} is damaged ({error})"
        self._damaged |= {folder.path.absolute() for folder in problems}
        if problems:
            warnings.warn(
                f"{'; '.join(problems.values())}; using that of step {checkpoint.step}",
                CheckpointWarning,
                stacklevel=2,
            )
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

    def _everyones_folders(self) -> list[StepFolder]:
        """The folders that process 0 sees, which has written them: on a network file system
        another one may see them later.

        Raises:
            CheckpointError: another does not see the newest.
        """
        while True:
            seen = [[f.number, f.step, f.path.name] for f in step_folders(self._directory)]
            rows = popdist.gather(seen)[0]
            folders = [StepFolder(n, step, self._directory / name) for n, step, name in rows]
            if not folders or popdist.getNumInstances() == 1:
                return folders
            newest = folders[0].path
            blind = [i for i, sees in enumerate(popdist.gather(appears(newest))) if not sees]
            if not blind:
                return folders
            still_there, path = popdist.gather([newest.is_dir(), shown_path(newest)])[0]
            if still_there:  # and not deleted by a run that saves meanwhile
                raise DifferentCopiesError(
                    f"process {blind[0]} does not see {path}, the "
                    "newest step that process 0 sees: give a folder that all hosts share"
                )

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
        what = f"cannot save step {manifest.step} in {shown_path(self._directory)}"
        save_with_retries(lambda: self._write_once(manifest, tensors()), what)
        seconds = time.monotonic() - begun
        self.saved = Saved(manifest.step, self._written, seconds, time.time())
        if self._to_keep is not None and popdist.getInstanceIndex() == 0:
            self._remove_older(self._to_keep)

    def _remove_older(self, to_keep: int) -> None:
        """The step is saved by now: what fails here is told, and no failure of the save."""
        try:
            remove_older(self._directory, to_keep, self._damaged | _set_aside.keys())
        except (OSError, CheckpointError) as error:
            what = f"cannot look for older steps in {shown_path(self._directory)}"
            warnings.warn(f"{what}: {reason_of(error)}", CheckpointWarning, stacklevel=2)

    def _write_once(self, manifest: Manifest, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Write a step, or raise on all processes."""
        if popdist.getInstanceIndex():
            self._write_share(Path(on_all_processes(lambda: "", self._channel)[0]), tensors)
            on_all_processes(lambda: "", self._channel)
            return
        with ExitStack() as stack:
            begin = partial(stack.enter_context, self._begun(manifest.step))
            folder = Path(on_all_processes(lambda: str(begin()), self._channel)[0])
            records, tables = self._write_share(folder, tensors)

            def commit() -> None:
                for name, text in manifest.texts.items():
                    write_synced(folder / name, text)
                digests = {n: digest_of_bytes(text.encode()) for n, text in manifest.texts.items()}
                replace(manifest, tensors=records, texts=digests, tables=tables).write(folder)
                Manifest.read(folder).open(folder)  # what could not be read is no step
                stack.close()

            on_all_processes(commit, self._channel)

    @contextmanager
    def _begun(self, step: int) -> Iterator[Path]:
        """The folder of a step that is being written."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if not self._has_saved:
            remove_leftovers(self._directory)
            self._has_saved = True
        with new_step_folder(self._directory, step) as folder:
            yield folder
            self._written = self._directory / folder.name.removeprefix(DRAFT)

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
            table = Table(write_tensors(folder, f"{prefix}-", tensors, self._shard_bytes))
            return [f"{prefix}.json", table.write(folder / f"{prefix}.json")]

        return {}, dict(on_all_processes(written, self._channel))

    def _absent(self, step: int | None) -> str:
        steps = self.steps()
        if step is not None and steps:
            there = ", ".join(map(str, steps))
            return f"no checkpoint of step {step} in {self._directory}; there are: {there}"
        return (
            f"no checkpoint in {self._directory}: give a folder written by --save, "
            "or a Hugging Face model folder"
        )


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


def has_checkpoint(path: str | Path) -> bool:
    """Whether `load_checkpoint` would find anything there, good or damaged."""
    return (Path(path) / FILE_NAME).is_file() or bool(step_folders(Path(path)))


def load_checkpoint(path: str | Path, verify: bool = True) -> Checkpoint:
    """Load from a directory of checkpoints its newest good one, or from the folder of one step.

    Args:
        verify: as for `CheckpointStore.load`.

    Raises:
        CheckpointError: if there is no good one.
    """
    path = Path(path)
    if (path / FILE_NAME).is_file():
        return _read(path, verify)
    return CheckpointStore(path).load(verify=verify)


def _read(folder: Path, verify: bool) -> Checkpoint:
    """Read the folder of a step and verify it, also the values if that is asked; `CheckpointError`
    if it is damaged. Of several processes all come to the same end.
    """
    problem, checkpoint = _set_aside.get(folder.absolute()), None
    if problem is not None:
        raise CheckpointError(problem)
    try:
        manifest = Manifest.read(folder)
        manifest.check_texts(folder)
        tensors = manifest.open(folder, at_once=verify or popdist.getNumInstances() == 1)
        checkpoint = Checkpoint(manifest.step, tensors, manifest.metadata, folder, manifest.sha256)
    except OtherFormatError:
        raise
    except CheckpointError as error:
        problem = str(error)
    outcomes = popdist.gather([problem, checkpoint.sha256 if checkpoint else ""])
    problems = [text for text, _ in outcomes if text is not None]
    if problems or checkpoint is None:
        raise CheckpointError(problems[0])
    for process, (_, sha256) in enumerate(outcomes):
        if sha256 != outcomes[0][1]:
            raise DifferentCopiesError(
                f"process {process} reads another {shown_path(folder)} than process 0: give a "
                "folder that all hosts share, or the same copy on each"
            )
    if verify:
        checkpoint.verify()
    return checkpoint
