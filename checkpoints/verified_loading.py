"""Load the newest undamaged checkpoint of a directory, the same one on all processes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import popdist
from checkpoints.collective_io import wait_until_visible
from checkpoints.errors import (
    CheckpointError,
    CheckpointWarning,
    FormatVersionError,
    InconsistentCheckpointError,
    raise_damage_on_all_processes,
)
from checkpoints.step_folders import MANIFEST, StepFolder, list_step_folders
from files.formatting import format_path

if TYPE_CHECKING:
    from checkpoints.tensor_files import TensorFiles

_damaged: dict[Path, str] = {}
"""Step folders that this process found damaged and no longer loads, with the reason."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A saved step whose manifest and file headers are verified; values are verified on access."""

    step: int
    """Number of optimizer steps done."""

    tensors: TensorFiles
    """Logical tensors by name; each access reads a tensor from disk and verifies it."""

    metadata: dict[str, Any]
    """Metadata saved with the tensors, after a JSON round trip: tuples are lists."""

    path: Path
    """The step's folder."""

    sha256: str = ""
    """Digest of the manifest, which covers all files."""

    def verify(self) -> None:
        """Read and verify all tensor values once; collective: each process reads some of them.

        Raises:
            DamagedCheckpointError: on all processes, if a value is not the saved one.
        """
        with raise_damage_on_all_processes():
            self.tensors.verify(popdist.getInstanceIndex(), popdist.getNumInstances())

    def mark_damaged(self, reason: str) -> None:
        """Mark this saved step as damaged, so that later loads use the previous one; collective."""
        _damaged[self.path.absolute()] = reason


def get_damaged_folders() -> set[Path]:
    """Return the absolute paths of the step folders that this process has marked as damaged."""
    return {*_damaged}


def has_checkpoint(path: str | Path) -> bool:
    """True if the path is a saved step's folder or contains one, damaged or not."""
    return (Path(path) / MANIFEST).is_file() or bool(list_step_folders(Path(path)))


def load_checkpoint(path: str | Path, verify: bool = True) -> SavedCheckpoint:
    """Load the newest undamaged step of a run folder, or the step of a step folder.

    Args:
        verify: as for `load_newest`.

    Raises:
        CheckpointError: there is no undamaged step.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return _read_step(path, verify)
    return load_newest(path, verify=verify)[0]


def load_newest(
    directory: Path, step: int | None = None, verify: bool = True
) -> tuple[SavedCheckpoint, set[Path]]:
    """Load the newest undamaged step, or `step`; also returns the paths of damaged steps.

    A `CheckpointWarning` names each damaged step that is skipped, and the reason. Collective.

    Args:
        step: number of optimizer steps; None: the newest step.
        verify: True reads and verifies all tensors now. False verifies each tensor when it is
            read; the caller then calls `SavedCheckpoint.mark_damaged` on DamagedCheckpointError.

    Raises:
        CheckpointError: there is no undamaged step, or another format version wrote the newest.
    """
    problems: dict[StepFolder, str] = {}
    while True:
        folders = [
            f for f in _list_folders_on_all_processes(directory) if step is None or f.step == step
        ]
        # A step that a running training has just deleted is not damaged.
        problems = {folder: problems[folder] for folder in folders if folder in problems}
        folder = next((folder for folder in folders if folder not in problems), None)
        if folder is None:
            raise CheckpointError(
                "; ".join(problems.values()) or _not_found_message(directory, step)
            )
        try:
            checkpoint = _read_step(folder.path, verify)
            break
        except (FormatVersionError, InconsistentCheckpointError):
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


def _list_folders_on_all_processes(directory: Path) -> list[StepFolder]:
    """Return the step folders that process 0 sees, once all processes see the newest of them.

    Raises:
        InconsistentCheckpointError: a process does not see the newest.
    """
    while True:
        local = [[f.number, f.step, f.path.name] for f in list_step_folders(directory)]
        first = popdist.all_gather_object(local)[0]
        folders = [StepFolder(n, step, directory / name) for n, step, name in first]
        if not folders or popdist.getNumInstances() == 1:
            return folders
        newest = folders[0].path
        visible = popdist.all_gather_object(wait_until_visible(newest))
        blind = [process for process, is_visible in enumerate(visible) if not is_visible]
        if not blind:
            return folders
        exists, path = popdist.all_gather_object([newest.is_dir(), format_path(newest)])[0]
        if exists:  # otherwise a running training has deleted it meanwhile
            raise InconsistentCheckpointError(
                f"process {blind[0]} does not see {path}, the "
                "newest step that process 0 sees: give a folder that all hosts share"
            )


def _not_found_message(directory: Path, step: int | None) -> str:
    steps = [folder.step for folder in reversed(list_step_folders(directory))]
    if step is not None and steps:
        names = ", ".join(map(str, steps))
        return f"no checkpoint of step {step} in {directory}; there are: {names}"
    return (
        f"no checkpoint in {directory}: give a folder written by --save, "
        "or a Hugging Face model folder"
    )


def _read_step(folder: Path, verify: bool) -> SavedCheckpoint:
    """Read and verify a step folder; collective: returns or raises alike on all processes.

    Args:
        verify: verify the values, too.

    Raises:
        CheckpointError: the step is damaged.
    """
    from checkpoints.manifest import Manifest  # with the readers of tensor files

    problem, checkpoint = _damaged.get(folder.absolute()), None
    if problem is not None:
        raise CheckpointError(problem)
    try:
        manifest = Manifest.read(folder)
        manifest.check_text_files(folder)
        tensors = manifest.open_tensor_files(folder, eager=verify or popdist.getNumInstances() == 1)
        checkpoint = SavedCheckpoint(
            manifest.step, tensors, manifest.metadata, folder, manifest.sha256
        )
    except FormatVersionError:
        raise
    except CheckpointError as error:
        problem = str(error)
    outcomes = popdist.all_gather_object([problem, checkpoint.sha256 if checkpoint else ""])
    problems = [text for text, _ in outcomes if text is not None]
    if problems or checkpoint is None:
        raise CheckpointError(problems[0])
    for process, (_, sha256) in enumerate(outcomes):
        if sha256 != outcomes[0][1]:
            raise InconsistentCheckpointError(
                f"process {process} reads another {format_path(folder)} than process 0: give a "
                "folder that all hosts share, or the same copy on each"
            )
    if verify:
        checkpoint.verify()
    return checkpoint
