"""Arrays by name that are read or made when they are asked for, so that memory holds a few."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence

import numpy as np

from checkpoints.safetensors_files import TensorSpec
from checkpoints.tensor_shards import Part

Arrays = Mapping[str, np.ndarray]


class LazyArrays(Arrays):
    """Arrays by name; asking for a name does not make its array.

    Attributes:
        concurrent: whether several threads may ask for some at a time.
    """

    concurrent = True

    def __init__(self, makers: Mapping[str, Callable[[], np.ndarray]]) -> None:
        """Args: `makers`: what makes each array."""
        self._names: Collection[str] = makers
        self._makers = makers

    def __getitem__(self, name: str) -> np.ndarray:
        """Make an array. Raises KeyError if there is none of that name."""
        return self._makers[name]()

    def some(self, name: str, wanted: Sequence[Part]) -> np.ndarray:
        """Return an array with the elements of the parts `wanted`; the others may be 0 instead."""
        return self[name]

    def spec(self, name: str) -> TensorSpec:
        """Return the dtype and shape of an array, which is made if nothing else says them."""
        array = self[name]
        return TensorSpec(array.dtype, array.shape)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class View(LazyArrays):
    """Arrays of a source, under other names, or changed or checked when they are read.

    Args:
        names: of those that there are; None: all.
        change: of a new name and the array, of which some parts alone may have been read.
        in_full: names whose arrays are changed in full only.
        renamed: the source's names by their new ones, in place of `names`.
    """

    def __init__(
        self,
        source: Arrays,
        names: Iterable[str] | None = None,
        change: Callable[[str, np.ndarray], np.ndarray] | None = None,
        in_full: Container[str] = (),
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        if renamed is None:
            renamed = {name: name for name in (source if names is None else names)}
        self._names = self._renamed = renamed
        self._source, self._change, self._in_full = source, change, in_full
        self.concurrent = getattr(source, "concurrent", True)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._changed(name, self._source[self._renamed[name]])

    def some(self, name: str, wanted: Sequence[Part]) -> np.ndarray:
        """As of `LazyArrays`."""
        if name in self._in_full:
            return self[name]
        return self._changed(name, _some(self._source, self._renamed[name], wanted))

    def spec(self, name: str) -> TensorSpec:
        """As of `LazyArrays`."""
        if self._change is None and isinstance(self._source, LazyArrays):
            return self._source.spec(self._renamed[name])
        return super().spec(name)

    def _changed(self, name: str, array: np.ndarray) -> np.ndarray:
        return array if self._change is None else self._change(name, array)


class Overlay(LazyArrays):
    """Some arrays, and those of other names that lie below."""

    def __init__(self, own: Arrays, below: Arrays) -> None:
        self._own, self._below = own, below
        self._names = dict.fromkeys([*below, *own])

    def __getitem__(self, name: str) -> np.ndarray:
        return (self._own if name in self._own else self._below)[name]

    def some(self, name: str, wanted: Sequence[Part]) -> np.ndarray:
        """As of `LazyArrays`."""
        return _some(self._own if name in self._own else self._below, name, wanted)


def _some(source: Arrays, name: str, wanted: Sequence[Part]) -> np.ndarray:
    return source.some(name, wanted) if isinstance(source, LazyArrays) else source[name]
