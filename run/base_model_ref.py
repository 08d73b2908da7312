"""Reference to the frozen base model whose weights a run's checkpoints do not contain.

If the base is a step of another run, which that run can delete, the run keeps a copy in its own
folder: hard links or, on another disk, copied weights. The copy is found by the digest of its
manifest, so that run folders can be moved.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import popdist
from config.run import RANDOM
from files.atomic_writing import write_folder_atomically, write_synced
from files.formatting import format_path
from files.json_files import JsonObject
from files.run_folder import CONFIG, RunFolder
from files.yaml_files import dump_yaml
from modelling.weights import FP8_PREFIX, OPTIMIZER_PREFIX
from terminal.screen import is_first_process

if TYPE_CHECKING:
    from checkpoints import SavedCheckpoint

_BASE, _STEP = "base", "step"  # keys of the metadata, and of the base in it


@dataclass(frozen=True)
class BaseModelRef:
    """Reference to a frozen base model: its name and the SHA-256 hashes of its weights.

    Attributes:
        name: folder, name on the hub, or "random".
        sha256: digests of its weights by logical name, as far as they are known.
        step: digest of the manifest, if it is a step of a run; None otherwise.
    """

    name: str
    sha256: Mapping[str, str] = field(default_factory=dict)
    step: str | None = None

    @classmethod
    def from_location(cls, location: str | Path, step: str | None = None) -> BaseModelRef:
        """Create the reference to a base model at a location; a folder's path is made absolute."""
        return cls(
            str(Path(location).resolve()) if Path(location).exists() else str(location), step=step
        )

    @classmethod
    def from_checkpoint(cls, checkpoint: SavedCheckpoint) -> BaseModelRef | None:
        """Read the reference from a checkpoint; None if the checkpoint contains all weights."""
        metadata = metadata_of(checkpoint)
        if _BASE not in metadata:
            return None
        saved = metadata.get_object(_BASE)
        step = saved.get_text(_STEP) if _STEP in saved else None
        return cls(saved.get_text("name"), saved.get_text_dict("sha256"), step)

    def local_copy(self, folder: Path) -> Path:
        """Return the path of the base model's copy in a folder, such as a run's `base` folder."""
        return folder / (self.step or "")[:16]

    def find_checkpoint(self, near_step: Path | None, given_location: str | None = None) -> str:
        """Return the base model's location: a local copy, the given location, or its name."""
        from checkpoints import has_checkpoint

        if near_step is not None and self.step is not None:
            for folder in (RunFolder.from_step_folder(near_step).base_folder, near_step.parent):
                if has_checkpoint(self.local_copy(folder)):
                    return str(self.local_copy(folder))
        return given_location or self.name

    def name_relative_to(self, folder: str | Path) -> str | None:
        """Return the base model's name for adapter_config.json: on the hub, or a relative path.

        None for random weights. A relative path reveals nothing about this machine.
        """
        if self.name == RANDOM:
            return None
        if not (os.path.isabs(self.name) or Path(self.name).exists()):
            return self.name
        return os.path.relpath(os.path.realpath(self.name), os.path.realpath(folder))

    def to_metadata(self, sha256: Mapping[str, str]) -> dict[str, Any]:
        """Return the reference as metadata to store in a checkpoint.

        Args:
            sha256: digests of the weights that the checkpoint does not contain.
        """
        step = {} if self.step is None else {_STEP: self.step}
        return {_BASE: {"name": self.name, "sha256": dict(sha256), **step}}


def keep_base_steps(
    run: RunFolder, bases: Iterable[BaseModelRef], initial_checkpoint: SavedCheckpoint | None
) -> set[Path]:
    """Copy those base models that are checkpoints of other runs into the run folder; collective.

    Args:
        bases: references; those that are not steps or cannot be found are skipped.
        initial_checkpoint: the step that the run starts from, whose files are open.

    Returns:
        The folders in `run.base_folder` that the run depends on.

    Raises:
        WriteError: a copy does not fit on the disk.
    """
    from checkpoints import has_checkpoint

    kept_folders: set[Path] = set()
    for base in bases:
        reference: BaseModelRef | None = base
        near_step = initial_checkpoint
        while reference is not None and reference.step is not None:
            near_step = _find_step(reference, near_step)
            if near_step is None:
                break
            folder = reference.local_copy(run.base_folder)
            if is_first_process() and not has_checkpoint(folder):
                _link_or_copy(near_step, folder)
            kept_folders.add(folder)
            reference = BaseModelRef.from_checkpoint(near_step)
    return kept_folders


def remove_unused_base_steps(run: RunFolder, kept_folders: Collection[Path]) -> None:
    """Delete copies of base models in a run folder that its checkpoints no longer refer to."""
    for path in run.base_folder.iterdir() if run.base_folder.is_dir() else ():
        if path not in kept_folders:
            shutil.rmtree(path, ignore_errors=True)


def _find_step(base: BaseModelRef, near_step: SavedCheckpoint | None) -> SavedCheckpoint | None:
    """Find the checkpoint that is the base model: `near_step`, a copy near it, or the original."""
    from checkpoints import has_checkpoint, load_checkpoint

    if near_step is not None and near_step.sha256 == base.step:
        return near_step
    location = base.find_checkpoint(None if near_step is None else near_step.path)
    if not all(popdist.all_gather_object(has_checkpoint(location))):
        return None
    return load_checkpoint(location, verify=False)


def _link_or_copy(step: SavedCheckpoint, folder: Path) -> None:
    def fill_draft(draft: Path) -> None:
        try:
            for file in step.path.iterdir():
                os.link(file, draft / file.name)
        except OSError:  # another disk, no hard links, or the step was just deleted
            for file in draft.iterdir():
                file.unlink()
            _copy_weights(step, draft)

    write_folder_atomically("the model that the run begins with", folder, fill_draft)


def _copy_weights(source_step: SavedCheckpoint, target_folder: Path) -> None:
    """Write a copy of a checkpoint that has only the weights, without optimizer state."""
    from checkpoints.manifest import Manifest
    from checkpoints.safetensors_files import sha256_of_bytes
    from checkpoints.store import SHARD_BYTES, write_tensors

    tensors = ((name, source_step.tensors[name]) for name in weight_names(source_step))
    records = write_tensors(target_folder, "tensors-", tensors, SHARD_BYTES)
    config = dump_yaml(metadata_of(source_step).get_dict("config"))
    write_synced(target_folder / CONFIG, config)
    texts = {CONFIG: sha256_of_bytes(config.encode())}
    Manifest(source_step.step, source_step.metadata, records, texts).write(target_folder)


def weight_names(checkpoint: SavedCheckpoint) -> list[str]:
    """Return the names of the tensors in a checkpoint that are model weights."""
    return [
        n
        for n in checkpoint.tensors
        if not n.startswith((f"{OPTIMIZER_PREFIX}/", f"{FP8_PREFIX}/"))
    ]


def metadata_of(checkpoint: SavedCheckpoint) -> JsonObject:
    """Return a checkpoint's metadata as a JSON object with typed access."""
    return JsonObject(checkpoint.metadata, f"the manifest of {format_path(checkpoint.path)}")
