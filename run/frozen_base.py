"""The model whose weights a run did not train: checkpoints name it, and do not hold them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import CheckpointError, has_checkpoint
from checkpoints.arrays import Arrays, LazyArrays, View
from checkpoints.safetensors_files import digest
from files.json_files import Fields
from files.run_folder import RunFolder
from files.shown import shown_path
from huggingface.models import RANDOM

_BASE, _STEP = "base", "step"  # among a checkpoint's metadata, and in its base


@dataclass(frozen=True)
class Base:
    """
    Attributes:
        name: a folder, a name of the hub, or "random".
        sha256: digests of the weights that it has, by logical name; None: not known yet.
        step: digest of its manifest, if it is a step of a run, which that run may delete.
    """

    name: str
    sha256: Mapping[str, str] | None = None
    step: str | None = None

    @classmethod
    def at(cls, place: str | Path, step: str | None = None) -> Base:
        """What is to be found again from any folder."""
        return cls(str(Path(place).resolve()) if Path(place).exists() else str(place), step=step)

    @classmethod
    def saved(cls, metadata: Fields) -> Base | None:
        """That of a checkpoint; None: it holds all weights."""
        if _BASE not in metadata.data:
            return None
        saved = metadata.object(_BASE)
        step = saved.text(_STEP) if _STEP in saved else None
        return cls(saved.text("name"), saved.texts("sha256"), step)

    def kept_in(self, folder: Path) -> Path:
        """The folder in a run's `base` in which a step is kept."""
        return folder / (self.step or "")[:16]

    def place(self, near: Path | None, said: str | None = None) -> str:
        """Where the model is: kept beside the step at `near` that names it, else where it is said
        to be, else at its name."""
        if near is not None and self.step is not None:
            for folder in (RunFolder.of_step(near).base, near.parent):
                if has_checkpoint(self.kept_in(folder)):
                    return str(self.kept_in(folder))
        return said or self.name

    def seen_from(self, folder: str | Path) -> str | None:
        """The base's name in an adapter's folder: that of the hub, or a path from the folder, which
        says nothing of this machine; None: random weights, which no folder has."""
        if self.name == RANDOM:
            return None
        if not (os.path.isabs(self.name) or Path(self.name).exists()):
            return self.name
        return os.path.relpath(os.path.realpath(self.name), os.path.realpath(folder))

    def of(self, sha256: Mapping[str, str], names: Sequence[str]) -> Base:
        """The base of the weights `names` alone, with their digests."""
        return replace(self, sha256={name: sha256[name] for name in names})

    def record(self) -> dict[str, Any]:
        """What a checkpoint's metadata have of it."""
        step = {} if self.step is None else {_STEP: self.step}
        return {_BASE: {"name": self.name, "sha256": dict(self.sha256 or {}), **step}}


def unavailable(names: Iterable[str], error: CheckpointError) -> Arrays:
    """The weights of a base that cannot be read, for who may not need them."""

    def fail() -> np.ndarray:
        raise error

    return LazyArrays(dict.fromkeys(names, fail))


def verified(base: Base, weights: Arrays, what: tuple[str, str]) -> Arrays:
    """The weights of a base, verified as they are read, each whole.

    Args:
        weights: those that are at the base's place.
        what: the checkpoint that has the others, and the base, for people.
    """
    sha256 = base.sha256 or {}

    def checked(name: str, array: np.ndarray) -> np.ndarray:
        if digest(array) != sha256[name]:
            checkpoint, place = map(shown_path, what)
            raise CheckpointError(
                f"{place} is not the model that the run in {checkpoint} began with: {name} is "
                "another; --checkpoint.base names the folder of that model"
            )
        return array

    return View(weights, sha256, checked, in_full=sha256)
