"""A directory of checkpoints: saves in the background, loads the newest good one.

Several processes save and load together. Each writes files of its own into the folder of the step;
process 0 makes that folder, and commits it when the others have said that theirs are on the disk.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError

import popdist
from checkpoints.errors import CheckpointError, CheckpointWarning, NewerFormatError
from checkpoints.folders import (
    new_step_folder,
    remove_leftovers,
    remove_older,
    step_folders,
)
from checkpoints.manifest import FILE_NAME, Manifest, Parts, TensorRecord, text_digest
from checkpoints.parts import InParts, TensorPart
from checkpoints.shards import own_parts, own_share, shards_of, write_shard, write_synced
from checkpoints.tensor_files import TensorFiles

SHARD_BYTES = 2**30


@dataclass(frozen=True)
class Checkpoint:
    """A saved state that was verified."""

    step: int
    """Optimizer steps done when it was saved."""

    tensors: TensorFiles
    """Logical tensors by name; each access reads one from disk and verifies it again."""

    metadata: dict[str, Any]
    """What was saved with them, as JSON gives it back: tuples have become lists."""

    path: Path
    """Its folder."""


class CheckpointStore:
    """Saves and loads the steps of one run. One run at a time may save in a directory."""

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
        self._shard_bytes = shard_bytes
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._damaged: set[Path] = set()
        self._has_saved = False

    def save(
        self,
        step: int,
        tensors: Mapping[str, np.ndarray],
        metadata: Mapping[str, Any],
        wait: bool = False,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Save a step, as the newest.

        A save that still runs is waited for first, so that at most one copy exists. Several
        processes save together: each writes what it holds, if the tensors can be had in parts
        (`checkpoints.parts.InParts`), else its share of the tensors, all of which it can read.

        Args:
            step: optimizer steps done.
            tensors: arrays by name. Any name will do.
            metadata: a small record of anything JSON can hold.
            wait: False copies all tensors and returns; the copy is written in the background.
                True returns when the step is on disk, and copies nothing: a mapping that makes
                each array on access needs memory for one safetensors file only.
            texts: text files to have beside the tensors, by name, such as config.yml.

        Raises:
            CheckpointError: if this save, or with `wait=False` the one before, cannot be written.
                Older checkpoints are intact then.
            TypeError, ValueError: if tensors or metadata are of a kind that cannot be saved.
        """
        self.wait()
        record: dict[str, Any] = json.loads(json.dumps(dict(metadata)))
        parts, own = _own(tensors)
        manifest = Manifest(step, record, {}, dict(texts or {}), parts)
        if wait:
            self._write(manifest, own)
            return
        copies = {name: array.copy() for name, array in own}
        self._pending = self._writer.submit(self._write, manifest, copies.items())

    def wait(self) -> None:
        """Return when nothing is being saved.

        Raises:
            CheckpointError: if the save that was waited for could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load(self, step: int | None = None) -> Checkpoint:
        """The newest step whose every byte is as it was saved, or the `step` asked for.

        All tensors are read once here to verify them, a few at a time. If a newer step is
        damaged, a `CheckpointWarning` says which and why.

        Raises:
            CheckpointError: if there is no good one, or a later version of this wrote the newest.
        """
        self.wait()
        problems: list[str] = []
        for folder in step_folders(self._directory):
            if step is not None and folder.step != step:
                continue
            try:
                checkpoint = _read(folder.path)
            except NewerFormatError:
                raise
            except CheckpointError as error:
                self._damaged.add(folder.path)
                problems.append(f"the checkpoint of step {folder.step} is damaged ({error})")
                continue
            if problems:
                warnings.warn(
                    f"{'; '.join(problems)}; using that of step {checkpoint.step}",
                    CheckpointWarning,
                    stacklevel=2,
                )
            return checkpoint
        raise CheckpointError("; ".join(problems) or self._absent(step))

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

    def _write(self, manifest: Manifest, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Write a step.

        Args:
            manifest: without records of the tensors, and with the texts themselves.
            tensors: what this process stores.
        """
        step, texts = manifest.step, manifest.texts
        try:
            if popdist.getInstanceIndex():
                self._write_share(self._everyones(None)[0], tensors)
                return
            self._directory.mkdir(parents=True, exist_ok=True)
            if not self._has_saved:
                remove_leftovers(self._directory)
                self._has_saved = True
            with new_step_folder(self._directory, step) as folder:
                self._everyones(str(folder))
                records = self._write_share(str(folder), tensors)
                for name, text in texts.items():
                    write_synced(folder / name, text)
                digests = {name: text_digest(text.encode()) for name, text in texts.items()}
                replace(manifest, tensors=records, texts=digests).write(folder)
            if self._to_keep is not None:
                remove_older(self._directory, self._to_keep, self._damaged)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(
                f"cannot save step {step} in {self._directory}: {reason}"
            ) from error

    def _write_share(
        self, folder: str, tensors: Iterable[tuple[str, np.ndarray]]
    ) -> dict[str, TensorRecord]:
        """Write the tensors of this process, and return the records of those of all of them."""
        prefix = f"{popdist.getInstanceIndex():05d}-" if popdist.getNumInstances() > 1 else ""
        records: dict[str, TensorRecord] = {}
        for number, shard in enumerate(shards_of(tensors, self._shard_bytes), 1):
            file = f"tensors-{prefix}{number:05d}.safetensors"
            records |= {name: TensorRecord.of(array, file) for name, array in shard.items()}
            write_shard(Path(folder) / file, shard)
        written = self._everyones({name: asdict(record) for name, record in records.items()})
        return {name: TensorRecord(**row) for rows in written for name, row in rows.items()}

    def _everyones(self, value: Any) -> list[Any]:
        """What each process has to say about the save that is being written."""
        return popdist.gather(value, "checkpoint")

    def _absent(self, step: int | None) -> str:
        steps = self.steps()
        if step is not None and steps:
            there = ", ".join(map(str, steps))
            return f"no checkpoint of step {step} in {self._directory}; there are: {there}"
        return (
            f"no checkpoint in {self._directory}: give a folder written by --save, "
            "or a Hugging Face model folder"
        )


def _own(
    tensors: Mapping[str, np.ndarray],
) -> tuple[dict[str, Parts], Iterable[tuple[str, np.ndarray]]]:
    """The parts in which tensors are stored, and what of them this process stores."""
    if popdist.getNumInstances() == 1 or not isinstance(tensors, InParts):
        return {}, own_share(tensors)
    parts: dict[str, Parts] = {}
    held: list[tuple[str, TensorPart]] = []
    for one in tensors.parts():
        of_tensor = parts.setdefault(one.name, {})
        stored = f"{one.name}@{len(of_tensor)}"
        of_tensor[stored] = one.part
        held.append((stored, one))
    return parts, own_parts(held)


def has_checkpoint(path: str | Path) -> bool:
    """Whether `load_checkpoint` would find anything there, good or damaged."""
    return (Path(path) / FILE_NAME).is_file() or bool(step_folders(Path(path)))


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Load from a directory of checkpoints its newest good one, or from the folder of one step.

    Raises:
        CheckpointError: if there is no good one.
    """
    path = Path(path)
    if (path / FILE_NAME).is_file():
        return _read(path)
    return CheckpointStore(path).load()


def _read(folder: Path) -> Checkpoint:
    """Read the folder of a step and verify all of it; `CheckpointError` if it is damaged.

    Of several processes each verifies its share, and all come to the same end.
    """
    problem, checkpoint = None, None
    try:
        manifest = Manifest.read(folder)
        manifest.check_texts(folder)
        tensors = manifest.open(folder)
        tensors.verify(popdist.getInstanceIndex(), popdist.getNumInstances())
        checkpoint = Checkpoint(manifest.step, tensors, manifest.metadata, folder)
    except NewerFormatError:
        raise
    except CheckpointError as error:
        problem = str(error)
    problems = [found for found in popdist.gather(problem) if found is not None]
    if problems or checkpoint is None:
        raise CheckpointError(problems[0])
    return checkpoint
