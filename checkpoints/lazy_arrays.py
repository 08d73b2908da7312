"""Lazy mappings of names to arrays: an array is read or computed on access."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from checkpoints.safetensors_files import ArraySpec
    from checkpoints.tensor_shards import TensorShard

Arrays = Mapping[str, np.ndarray]


class LazyArrays(Arrays):
    """Mapping of names to arrays, each computed when its name is accessed.

    Attributes:
        is_thread_safe: True if several threads can access arrays at the same time.
    """

    is_thread_safe = True

    def __init__(self, load_fns: Mapping[str, Callable[[], np.ndarray]]) -> None:
        """Map each name to the function in `load_fns` that returns its array."""
        self._names: Collection[str] = load_fns
        self._load_fns = load_fns

    def __getitem__(self, name: str) -> np.ndarray:
        """Compute an array. Raises KeyError for an unknown name."""
        return self._load_fns[name]()

    def read_shards(self, name: str, shards: Sequence[TensorShard]) -> np.ndarray:
        """Return a full-shape array in which at least the elements of `shards` are read.

        The other elements may be 0.
        """
        return self[name]

    def spec(self, name: str) -> ArraySpec:
        """Return dtype and shape of a named array; computes the array if no metadata have them."""
        from checkpoints.safetensors_files import ArraySpec

        array = self[name]
        return ArraySpec(array.dtype, array.shape)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class ArraysView(LazyArrays):
    """Lazy view of a mapping of arrays: a subset, renamed, or transformed on access.

    Args:
        names: subset of the source's names; None: all.
        transform: called with the new name and the array, of which only some shards may be read.
        in_full: names whose arrays `transform` needs in full.
        renamed: new name to source name; replaces `names`.
    """

    def __init__(
        self,
        source: Arrays,
        names: Iterable[str] | None = None,
        transform: Callable[[str, np.ndarray], np.ndarray] | None = None,
        in_full: Container[str] = (),
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        if renamed is None:
            renamed = {name: name for name in (source if names is None else names)}
        self._names = self._renamed = renamed
        self._source, self._transform, self._in_full = source, transform, in_full
        self.is_thread_safe = getattr(source, "is_thread_safe", True)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._apply_transform(name, self._source[self._renamed[name]])

    def read_shards(self, name: str, shards: Sequence[TensorShard]) -> np.ndarray:
        if name in self._in_full:
            return self[name]
        return self._apply_transform(name, _read_shards(self._source, self._renamed[name], shards))

    def spec(self, name: str) -> ArraySpec:
        if self._transform is None and isinstance(self._source, LazyArrays):
            return self._source.spec(self._renamed[name])
        return super().spec(name)

    def _apply_transform(self, name: str, array: np.ndarray) -> np.ndarray:
        return array if self._transform is None else self._transform(name, array)


class OverlayArrays(LazyArrays):
    """Mapping of arrays with the names of two mappings: `top` wins over `base`."""

    def __init__(self, top: Arrays, base: Arrays) -> None:
        self._top, self._base = top, base
        self._names = dict.fromkeys([*base, *top])

    def __getitem__(self, name: str) -> np.ndarray:
        return (self._top if name in self._top else self._base)[name]

    def read_shards(self, name: str, shards: Sequence[TensorShard]) -> np.ndarray:
        return _read_shards(self._top if name in self._top else self._base, name, shards)


def _read_shards(source: Arrays, name: str, shards: Sequence[TensorShard]) -> np.ndarray:
    return source.read_shards(name, shards) if isinstance(source, LazyArrays) else source[name]
