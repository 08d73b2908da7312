"""Loading a step: of a directory the newest good one, the same on all processes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import popdist
from checkpoints.collective_io import appears, raise_on_all
from checkpoints.errors import (
    CheckpointError,
    CheckpointWarning,
    DifferentCopiesError,
    OtherFormatError,
)
from checkpoints.manifest import FILE_NAME, Manifest
from checkpoints.step_folders import StepFolder, step_folders
from checkpoints.tensor_files import TensorFiles
from files.formatting import format_path

_damaged: dict[Path, str] = {}
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
    """Metadata saved with the tensors, as JSON gives it back: tuples have become lists."""

    path: Path
    """Its folder."""

    sha256: str = ""
    """The digest of its manifest, and so of all of it."""

    def verify(self) -> None:
        """Read every value once. Of several processes each reads a share.

        Raises:
            DamagedError: on all processes, about one that is not what was saved.
        """
        with raise_on_all():
            self.tensors.verify(popdist.getInstanceIndex(), popdist.getNumInstances())

    def mark_damaged(self, reason: str) -> None:
        """Load it no more in this process, since it turned out to be damaged: `load` then takes the
        step before. All processes do so."""
        _damaged[self.path.absolute()] = reason


def known_as_damaged() -> set[Path]:
    """The absolute paths of the folders that are loaded no more."""
    return {*_damaged}


def has_checkpoint(path: str | Path) -> bool:
    """True if `load_checkpoint` would find anything there, good or damaged."""
    return (Path(path) / FILE_NAME).is_file() or bool(step_folders(Path(path)))


def load_checkpoint(path: str | Path, verify: bool = True) -> Checkpoint:
    """Load from a directory of checkpoints its newest good one, or from the folder of one step.

    Args:
        verify: as for `load_newest`.

    Raises:
        CheckpointError: if there is no good one.
    """
    path = Path(path)
    if (path / FILE_NAME).is_file():
        return _read(path, verify)
    return load_newest(path, verify=verify)[0]


def load_newest(
    directory: Path, step: int | None = None, verify: bool = True
) -> tuple[Checkpoint, set[Path]]:
    """The newest step whose every byte is as it was saved, or the `step` asked for; and the
    absolute paths of those that are damaged.

    If a newer step is damaged, a `CheckpointWarning` says which and why.

    Args:
        verify: read all tensors once, in order to verify them. False leaves it to who reads
            them, and sets the step aside if one is damaged (`Checkpoint.mark_damaged`).

    Raises:
        CheckpointError: if there is no good one, or a later version of this wrote the newest.
    """
    problems: dict[StepFolder, str] = {}
    while True:
        folders = [f for f in _everyones_folders(directory) if step is None or f.step == step]
        # What a run that saves meanwhile has deleted is not damaged.
        problems = {folder: problems[folder] for folder in folders if folder in problems}
        folder = next((folder for folder in folders if folder not in problems), None)
        if folder is None:
            raise CheckpointError("; ".join(problems.values()) or _absent(directory, step))
        try:
            checkpoint = _read(folder.path, verify)
            break
        except (OtherFormatError, DifferentCopiesError):
            raise
        except CheckpointError as error:
            problems[folder] = f"the checkpoint of step {folder.step} is damaged ({error})"
    if problems:
        warnings.warn(
            f"{'; '.join(problems.values())}; using that of step {checkpoint.step}",
            CheckpointWarning,
            stacklevel=2,
        )
    return checkpoint, {folder.path.absolute() for folder in problems}


def _everyones_folders(directory: Path) -> list[StepFolder]:
    """The folders that process 0 sees, which has written them: on a network file system
    another one may see them later.

    Raises:
        CheckpointError: another does not see the newest.
    """
    while True:
        seen = [[f.number, f.step, f.path.name] for f in step_folders(directory)]
        rows = popdist.all_gather_object(seen)[0]
        folders = [StepFolder(n, step, directory / name) for n, step, name in rows]
        if not folders or popdist.getNumInstances() == 1:
            return folders
        newest = folders[0].path
        blind = [i for i, sees in enumerate(popdist.all_gather_object(appears(newest))) if not sees]
        if not blind:
            return folders
        still_there, path = popdist.all_gather_object([newest.is_dir(), format_path(newest)])[0]
        if still_there:  # and not deleted by a run that saves meanwhile
            raise DifferentCopiesError(
                f"process {blind[0]} does not see {path}, the "
                "newest step that process 0 sees: give a folder that all hosts share"
            )


def _absent(directory: Path, step: int | None) -> str:
    steps = [folder.step for folder in reversed(step_folders(directory))]
    if step is not None and steps:
        there = ", ".join(map(str, steps))
        return f"no checkpoint of step {step} in {directory}; there are: {there}"
    return (
        f"no checkpoint in {directory}: give a folder written by --save, "
        "or a Hugging Face model folder"
    )


def _read(folder: Path, verify: bool) -> Checkpoint:
    """Read the folder of a step and verify it, also the values if that is asked; `CheckpointError`
    if it is damaged. Of several processes all come to the same end.
    """
    problem, checkpoint = _damaged.get(folder.absolute()), None
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
    outcomes = popdist.all_gather_object([problem, checkpoint.sha256 if checkpoint else ""])
    problems = [text for text, _ in outcomes if text is not None]
    if problems or checkpoint is None:
        raise CheckpointError(problems[0])
    for process, (_, sha256) in enumerate(outcomes):
        if sha256 != outcomes[0][1]:
            raise DifferentCopiesError(
                f"process {process} reads another {format_path(folder)} than process 0: give a "
                "folder that all hosts share, or the same copy on each"
            )
    if verify:
        checkpoint.verify()
    return checkpoint
