"""Digests of what a run has read, since files can be rewritten while they are used."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from checkpoints import CheckpointError
from checkpoints.safetensors_files import digest
from checkpoints.tensor_files import readers
from checkpoints.tensor_shards import Part, PartialReader
from files.lazy import Lazy
from files.shown import shown_name
from modelling.weights import Arrays


class Digested(Lazy[np.ndarray]):
    """Tensors of which some must stay as they were when they were first read, each whole.

    Attributes:
        sha256: digests of those that were read, by name.
        concurrent: several threads may read some at a time.
    """

    def __init__(self, tensors: Arrays, fixed: Collection[str], source: str) -> None:
        """
        Args:
            fixed: names of those that must stay.
            source: of the tensors, for people.
        """
        super().__init__(dict.fromkeys(tensors))
        self._tensors, self._fixed, self._source = tensors, set(fixed), source
        self.sha256: dict[str, str] = {}
        self.concurrent = bool(getattr(tensors, "concurrent", False))

    def __getitem__(self, name: str) -> np.ndarray:
        """Read a tensor. Raises CheckpointError if it must stay, and is another than before."""
        array = self._tensors[name]
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
            f"{shown_name(name)} of {self._source} has changed while the run started: start again "
            "when nobody writes to these files, which must be the same on all hosts"
        )


class DigestedInParts(Digested):
    """The same of tensors that can be read in parts."""

    def some(self, name: str, wanted: Sequence[Part]) -> np.ndarray:
        """Like `PartialReader`; tensors that must stay are read whole."""
        if name in self._fixed or not isinstance(self._tensors, PartialReader):
            return self[name]
        return self._tensors.some(name, wanted)


def digested(tensors: Arrays, source: str, fixed: Collection[str] = ()) -> Digested:
    """Tensors with digests; see `Digested`."""
    kind = DigestedInParts if isinstance(tensors, PartialReader) else Digested
    return kind(tensors, fixed, source)
