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
import secrets
import shutil
import socket
import time
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import popdist
from checkpoints.errors import CheckpointError, CheckpointWarning
from files.drafts import sync
from files.run_folder import RunFolder
from files.shown import shown_path
from files.writing import write_synced, writing

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
DRAFT = ".draft-"
"""What the name of a step that is being written begins with."""
_SEEN = 10.0  # seconds
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
        raise CheckpointError(f"cannot read {shown_path(directory)}: {reason}") from error
    return sorted(filter(None, steps), reverse=True)


def step_folder(path: Path) -> StepFolder | None:
    """The step whose folder has this name; None: it is the name of none."""
    match = _NAME.fullmatch(path.name)
    return match and StepFolder(int(match[1]), int(match[2]), path)


def check_shared(directory: Path) -> None:
    """Check that all processes reach the same directory: what process 0 writes, all must read.

    It is made if it is not there.

    Raises:
        CheckpointError: a process does not see it.
        WriteError: process 0 cannot write.
    """
    if popdist.getNumInstances() == 1:
        return
    name, nonce = "", secrets.token_hex(16)
    if popdist.getInstanceIndex() == 0:
        name = f".shared-{nonce[:8]}"
        with writing("the folder", directory):
            directory.mkdir(parents=True, exist_ok=True)
            write_synced(directory / name, nonce)
    name, nonce, shown = popdist.gather([name, nonce, shown_path(directory)])[0]
    views = popdist.gather([socket.gethostname(), appears(directory / name, nonce)])
    if popdist.getInstanceIndex() == 0:
        (directory / name).unlink(missing_ok=True)
    blind = next((i for i, (_, sees) in enumerate(views) if not sees), None)
    if blind is not None:
        raise CheckpointError(
            f"process {blind} on {views[blind][0][:30]} does not see what process 0 writes into "
            f"{shown}: give --save a folder that all hosts share"
        )


def appears(path: Path, content: str | None = None) -> bool:
    """Whether something is there; network file systems show it after a while.

    Args:
        content: of the file that should be there.
    """
    end = time.monotonic() + _SEEN
    while True:
        with suppress(OSError):
            if path.exists() and (content is None or path.read_text(encoding="utf-8") == content):
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)


@contextmanager
def new_step_folder(directory: Path, step: int) -> Iterator[Path]:
    """An empty folder to fill, which becomes a step of `directory` at the end of the context.

    If the context fails, the folder is removed.
    """
    saved = step_folders(directory)
    name = f"{saved[0].number + 1 if saved else 0:06d}-step-{step}"
    with named_draft(directory, name) as draft:
        yield draft


@contextmanager
def named_draft(directory: Path, name: str) -> Iterator[Path]:
    """Like `new_step_folder`, for a step whose name is known."""
    draft = directory / f"{DRAFT}{name}"
    draft.mkdir()
    try:
        yield draft
        sync(draft)
        os.rename(draft, directory / name)
        sync(directory)
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
            f"cannot delete {shown_path(path)} ({error.strerror or error}): it is tried again at "
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
