"""The model whose weights a run did not train: checkpoints name it, and do not hold them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from checkpoints import CheckpointError, has_checkpoint
from checkpoints.safetensors_files import digest
from files.json_files import Fields
from files.lazy import Lazy
from files.run_folder import RunFolder
from files.shown import shown_path
from huggingface.models import RANDOM
from modelling.weights import Arrays

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


class Unavailable(Lazy[np.ndarray]):
    """The weights of a base that cannot be read, for who may not need them."""

    def __init__(self, names: Collection[str], error: CheckpointError) -> None:
        super().__init__(names)
        self._error = error

    def __getitem__(self, name: str) -> np.ndarray:
        raise self._error


class Verified(Lazy[np.ndarray]):
    """The weights of a base, verified as they are read, each whole.

    Args:
        weights: those that are at the base's place.
        what: the checkpoint that has the others, and the base, for people.
    """

    concurrent: ClassVar[bool] = True
    """Several threads may read some at a time."""

    def __init__(self, base: Base, weights: Arrays, what: tuple[str, str]) -> None:
        self._sha256, self._weights, self._what = base.sha256 or {}, weights, what
        super().__init__(self._sha256)

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._weights[name]
        if digest(array) != self._sha256[name]:
            checkpoint, place = map(shown_path, self._what)
            raise CheckpointError(
                f"{place} is not the model that the run in {checkpoint} began with: {name} is "
                "another; --checkpoint.base names the folder of that model"
            )
        return array
