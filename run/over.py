"""Tensors of two sources under one mapping: what a run holds, over what its base has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from checkpoints.tensor_shards import Part, PartialReader
from files.lazy import Lazy
from modelling.weights import Arrays


class Over(Lazy[np.ndarray]):
    """Some tensors, and those of other names that lie below."""

    concurrent: ClassVar[bool] = True
    """Several threads may read some at a time."""

    def __init__(self, own: Arrays, below: Arrays) -> None:
        self._own, self._below = own, below
        super().__init__(dict.fromkeys([*below, *own]))

    def __getitem__(self, name: str) -> np.ndarray:
        return (self._own if name in self._own else self._below)[name]

    def some(self, name: str, wanted: Sequence[Part]) -> np.ndarray:
        """Like `PartialReader`."""
        place = self._own if name in self._own else self._below
        return place.some(name, wanted) if isinstance(place, PartialReader) else place[name]
