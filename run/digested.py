"""Digests of what a run has read, since files can be rewritten while they are used."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from checkpoints import CheckpointError
from checkpoints.arrays import Arrays, View
from checkpoints.safetensors_files import digest
from checkpoints.tensor_files import readers
from files.shown import shown_name


class Digested(View):
    """Tensors of which some must stay as they were when they were first read, each whole.

    Attributes:
        sha256: digests of those that were read, by name.
    """

    def __init__(self, tensors: Arrays, source: str, fixed: Collection[str] = ()) -> None:
        """
        Args:
            source: of the tensors, for people.
            fixed: names of those that must stay.
        """
        self._fixed, self._place = set(fixed), source
        self.sha256: dict[str, str] = {}
        super().__init__(tensors, None, self._checked, in_full=self._fixed)

    def _checked(self, name: str, array: np.ndarray) -> np.ndarray:
        """Raise CheckpointError if a tensor must stay, and is another than before."""
        if name in self._fixed:
            sha256 = digest(array)
            if self.sha256.setdefault(name, sha256) != sha256:
                raise self.changed(name)
        return array

    def digests(self, names: Iterable[str]) -> Mapping[str, str]:
        """The digests of tensors, which must stay from now on. Those without one are read."""
        wanted = list(names)
        self._fixed.update(wanted)
        with readers() as pool:
            for _ in pool.map(self.__getitem__, [n for n in wanted if n not in self.sha256]):
                pass
        return {name: self.sha256[name] for name in wanted}

    def changed(self, name: str) -> CheckpointError:
        """The error for a tensor that is not the same each time it is read, or on each process."""
        return CheckpointError(
            f"{shown_name(name)} of {self._place} has changed while the run started: start again "
            "when nobody writes to these files, which must be the same on all hosts"
        )
