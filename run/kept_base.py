"""Steps of other runs that a run depends on, kept in its own folder: their owner deletes old steps.

A kept step has hard links to the step's files or, on another disk, a copy of its weights. It is
found by the digest of the step's manifest, so a run's folder can be moved.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

import popdist
from checkpoints import Checkpoint, has_checkpoint, load_checkpoint
from checkpoints.manifest import Manifest
from checkpoints.safetensors_files import digest_of_bytes
from checkpoints.store import SHARD_BYTES, write_tensors
from files.run_folder import CONFIG, RunFolder
from files.writing import write_folder, write_synced
from files.yaml_files import yaml_text
from run.frozen_base import Base
from run.weights import metadata_of, weight_names
from terminal.screen import is_first_process


def keep_steps(run: RunFolder, bases: Iterable[Base], start: Checkpoint | None) -> set[Path]:
    """Keep the steps that some models are, and those that they depend on in turn. All processes
    call it together.

    Args:
        bases: those that are no saved steps, or cannot be found, are passed over.
        start: the step that the run starts from; its files are open.

    Returns:
        The folders in `run.base` that the run depends on.

    Raises:
        WriteError: there is no room for a copy.
    """
    kept: set[Path] = set()
    for base in bases:
        one: Base | None = base
        near = start
        while one is not None and one.step is not None:
            near = _found(one, near)
            if near is None:
                break
            folder = one.kept_in(run.base)
            if is_first_process() and not has_checkpoint(folder):
                _keep(near, folder)
            kept.add(folder)
            one = Base.saved(metadata_of(near))
    return kept


def remove_other_steps(run: RunFolder, kept: Collection[Path]) -> None:
    """Delete the kept steps that a run does not depend on."""
    for path in run.base.iterdir() if run.base.is_dir() else ():
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _found(base: Base, near: Checkpoint | None) -> Checkpoint | None:
    """The step that a base is, which the step `near` names, or is."""
    if near is not None and near.sha256 == base.step:
        return near
    place = base.place(None if near is None else near.path)
    if not all(popdist.gather(has_checkpoint(place))):
        return None
    return load_checkpoint(place, verify=False)


def _keep(step: Checkpoint, folder: Path) -> None:
    def fill(draft: Path) -> None:
        try:
            for file in step.path.iterdir():
                os.link(file, draft / file.name)
        except OSError:  # another disk, one without links, or the owner has just deleted it
            for file in draft.iterdir():
                file.unlink()
            _copy(step, draft)

    write_folder("the model that the run begins with", folder, fill)


def _copy(step: Checkpoint, to: Path) -> None:
    """Write the weights of a step, as a step."""
    tensors = ((name, step.tensors[name]) for name in weight_names(step))
    records = write_tensors(to, "tensors-", tensors, SHARD_BYTES)
    config = yaml_text(metadata_of(step).mapping("config"))
    write_synced(to / CONFIG, config)
    texts = {CONFIG: digest_of_bytes(config.encode())}
    Manifest(step.step, step.metadata, records, texts).write(to)
