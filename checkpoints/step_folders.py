"""Step folders of a checkpoint directory, created and deleted atomically by renaming.

A step is written to a hidden folder and then renamed; a step is renamed to a hidden folder before
it is deleted. A killed process leaves only hidden folders, which the next save removes.

Folders are numbered in the order of saving, which decides the newest: a run resumed from step 100
that saves step 110 continues from there, even if an earlier attempt left step 200.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from checkpoints.errors import CheckpointError, CheckpointWarning
from files.formatting import format_path
from files.run_folder import RunFolder
from files.temp_folders import fsync

MANIFEST = "manifest.json"
"""File of a step's folder that names its other files (`checkpoints.manifest`)."""

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_DELETED = re.compile(r"\.deleted-" + _NAME.pattern)
_LEFTOVER = re.compile(_DELETED.pattern + r"|\.draft-" + _NAME.pattern + r"|\.shared-[0-9a-f]{8}")


class StepFolder(NamedTuple):
    """Folder of a saved step; ordered by save number, so that a later save compares greater."""

    number: int
    """Number of saves to this directory before this one."""

    step: int
    path: Path


def list_step_folders(directory: Path) -> list[StepFolder]:
    """Return the step folders of a directory, newest first; none if the directory is missing."""
    try:
        if not directory.is_dir():
            return []
        steps = [parse_step_folder(path) for path in directory.iterdir() if path.is_dir()]
    except OSError as error:
        reason = error.strerror
        raise CheckpointError(f"cannot read {format_path(directory)}: {reason}") from error
    return sorted(filter(None, steps), reverse=True)


def parse_step_folder(path: Path) -> StepFolder | None:
    """Parse a folder name as that of a saved step; returns None for other names."""
    match = _NAME.fullmatch(path.name)
    return match and StepFolder(int(match[1]), int(match[2]), path)


def next_folder_name(directory: Path, step: int) -> str:
    """Return the folder name, with save number and step, for the next save of a checkpoint."""
    saved = list_step_folders(directory)
    return f"{saved[0].number + 1 if saved else 0:06d}-step-{step}"


@contextmanager
def tmp_step_folder(directory: Path, name: str) -> Iterator[Path]:
    """A context with an empty temporary folder, renamed to the step folder `name` at its end.

    The folder is removed if the context raises.
    """
    tmp_folder = directory / f".draft-{name}"
    tmp_folder.mkdir()
    try:
        yield tmp_folder
        fsync(tmp_folder)
        os.rename(tmp_folder, directory / name)
        fsync(directory)
    finally:
        shutil.rmtree(tmp_folder, ignore_errors=True)


def remove_older_steps(directory: Path, to_keep: int, damaged: Collection[Path]) -> None:
    """Delete all but the newest `to_keep` step folders, and partly deleted ones.

    A folder that cannot be deleted is a `CheckpointWarning`; the next call tries again.

    Args:
        damaged: absolute paths of damaged steps, which do not count as kept.
    """
    kept: set[int] = set()
    for _, step, path in list_step_folders(directory):
        if step in kept or len(kept) == to_keep:
            with _warn_if_deletion_fails(path):
                os.rename(path, path.with_name(f".deleted-{path.name}"))
        elif path.absolute() not in damaged:
            kept.add(step)
    _remove_matching(directory, _DELETED)


def remove_partial_steps(directory: Path) -> None:
    """Delete step folders that a killed process partly wrote or deleted."""
    _remove_matching(directory, _LEFTOVER)


def _remove_matching(directory: Path, names: re.Pattern[str]) -> None:
    for path in directory.iterdir():
        if names.fullmatch(path.name):
            with _warn_if_deletion_fails(path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def _warn_if_deletion_fails(path: Path) -> Iterator[None]:
    """A context that turns a failed deletion of a step folder into a warning."""
    try:
        yield
    except OSError as error:
        warnings.warn(
            f"cannot delete {format_path(path)} ({error.strerror or error}): the next save tries "
            "again",
            CheckpointWarning,
            stacklevel=2,
        )


def remove_run_files(run: RunFolder) -> None:
    """Delete a run's steps, best weights, tokenizer and metrics; other files stay."""
    for directory in (run.path, run.best_folder):
        for _, _, path in list_step_folders(directory):
            hidden = path.with_name(f".deleted-{path.name}")
            os.rename(path, hidden)
            shutil.rmtree(hidden)
    shutil.rmtree(run.tokenizer_folder, ignore_errors=True)
    run.metrics_file.unlink(missing_ok=True)
