"""The folders of a directory of checkpoints: each complete from the moment it has its name.

A step is written in a hidden folder and then renamed; one to be deleted is first renamed to a
hidden name. A process that is killed leaves at most hidden folders, which the next one to save
removes.

Folders are numbered in the order of saving, because that is what decides which is the newest: a
run that was resumed from step 100 and saves step 110 has gone on from there, even if step 200 of
an earlier attempt is in the same directory.
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

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_DELETED = re.compile(r"\.deleted-" + _NAME.pattern)
_LEFT = re.compile(_DELETED.pattern + r"|\.draft-" + _NAME.pattern + r"|\.shared-[0-9a-f]{8}")


class StepFolder(NamedTuple):
    """One saved step."""

    number: int
    """How many saves of this directory came before it."""

    step: int
    path: Path


def step_folders(directory: Path) -> list[StepFolder]:
    """The steps in a directory, the last one saved first; none if there is no directory."""
    try:
        if not directory.is_dir():
            return []
        steps = [step_folder(path) for path in directory.iterdir() if path.is_dir()]
    except OSError as error:
        reason = error.strerror
        raise CheckpointError(f"cannot read {format_path(directory)}: {reason}") from error
    return sorted(filter(None, steps), reverse=True)


def step_folder(path: Path) -> StepFolder | None:
    """The step whose folder has this name; None: it is the name of none."""
    match = _NAME.fullmatch(path.name)
    return match and StepFolder(int(match[1]), int(match[2]), path)


def next_name(directory: Path, step: int) -> str:
    """The name of the folder of a step that is saved now."""
    saved = step_folders(directory)
    return f"{saved[0].number + 1 if saved else 0:06d}-step-{step}"


@contextmanager
def step_draft(directory: Path, name: str) -> Iterator[Path]:
    """An empty folder to fill, which becomes a step of `directory` at the end of the context.

    If the context fails, the folder is removed.
    """
    draft = directory / f".draft-{name}"
    draft.mkdir()
    try:
        yield draft
        fsync(draft)
        os.rename(draft, directory / name)
        fsync(directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def remove_older(directory: Path, to_keep: int, damaged: Collection[Path]) -> None:
    """Delete all but the last saves of the newest `to_keep` steps, and what is half deleted.

    Steps known to be damaged, by their absolute paths, do not push out the good ones. What cannot
    be deleted is told in a `CheckpointWarning`, and tried again the next time.
    """
    kept: set[int] = set()
    for _, step, path in step_folders(directory):
        if step in kept or len(kept) == to_keep:
            with _told(path):
                os.rename(path, path.with_name(f".deleted-{path.name}"))
        elif path.absolute() not in damaged:
            kept.add(step)
    _remove(directory, _DELETED)


def remove_leftovers(directory: Path) -> None:
    """Delete what a killed process left half written or half deleted; as `remove_older`."""
    _remove(directory, _LEFT)


def _remove(directory: Path, names: re.Pattern[str]) -> None:
    for path in directory.iterdir():
        if names.fullmatch(path.name):
            with _told(path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn a deletion that fails into a warning: nothing of the run depends on it."""
    try:
        yield
    except OSError as error:
        warnings.warn(
            f"cannot delete {format_path(path)} ({error.strerror or error}): it is tried again at "
            "the next save",
            CheckpointWarning,
            stacklevel=2,
        )


def remove_run(run: RunFolder) -> None:
    """Delete a run: its steps, its best weights, its tokenizer and its metrics; nothing else."""
    for directory in (run.path, run.best):
        for _, _, path in step_folders(directory):
            hidden = path.with_name(f".deleted-{path.name}")
            os.rename(path, hidden)
            shutil.rmtree(hidden)
    shutil.rmtree(run.tokenizer, ignore_errors=True)
    run.metrics.unlink(missing_ok=True)
