"""The names and shapes that a model's weights have in files, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from checkpoints.arrays import Arrays, LazyArrays
from files.shown import shown_name
from modelling.weights.mxfp4 import shapes_without_blocks, without_blocks
from modelling.weights.row import WeightsError, check_shape
from modelling.weights.stacked import Stacked

if TYPE_CHECKING:
    from modelling.weights.table import WeightTable


@dataclass(frozen=True)
class InFiles:
    """A table's weights in files, which may have other names for them, and join some."""

    table: WeightTable

    def renamed(self, tensors: Arrays) -> Arrays:
        """The weights of a file under their logical names; each is read when asked for.

        Raises:
            ValueError: a weight is missing, or there is an unknown one; when one is read that a
                file has under several names, they differ.
        """
        tensors = without_blocks(tensors)
        names = self._split_names(tensors)
        sources = self._sources(names)
        read = lru_cache(1)(tensors.__getitem__)  # the parts of one follow each other
        split = self._splits(tensors, read)
        made = {
            own: split.get(name) or partial(self._turned, tensors, name)
            for own, name in sources.items()
        }
        for name in names:
            own = self.table.aliases.get(name)
            if own is not None and sources[own] != name:
                copy = partial(self._turned, tensors, name)
                made[own] = partial(_same, made[own], sources[own], copy, name)
        return LazyArrays(made)

    def for_files(self, weights: Arrays) -> Arrays:
        """The inverse of `renamed`: logical weights as files have them."""
        stacked = {n: parts for n, parts in self.table.stacked.items() if parts.written}
        joined = {own for names in self.table.fused.values() for own in names}
        joined |= {own for parts in stacked.values() for own in parts.weights}
        makers = {n: partial(weights.__getitem__, n) for n in weights if n not in joined}
        for name, owns in self.table.fused.items():
            if all(own in weights for own in owns):
                makers[name] = partial(_joined, weights, owns)
        for name, parts in stacked.items():
            if all(own in weights for own in parts.weights):
                makers[name] = partial(parts.join, weights)
        return LazyArrays(makers)

    def _turned(self, tensors: Arrays, name: str) -> np.ndarray:
        """A tensor of a file as its logical weight is."""
        return tensors[name].T if name in self.table.turned else tensors[name]

    @property
    def _joined(self) -> dict[str, list[str]]:
        """Weights that files may have as one, by its name."""
        stacked = {name: parts.weights for name, parts in self.table.stacked.items()}
        return stacked | {name: list(owns) for name, owns in self.table.fused.items()}

    def _splits(
        self, names: Collection[str], read: Callable[[str], np.ndarray]
    ) -> dict[str, Callable[[], np.ndarray]]:
        """What makes each logical weight that a file joins with others."""
        splits: dict[str, Callable[[], np.ndarray]] = {}
        fused = {n: owns for n, owns in self.table.fused.items() if n in names}
        shapes = {w.name: w.shape for w in self.table.weights if fused}
        for name, owns in fused.items():
            ends = list(accumulate((shapes[own][0] for own in owns), initial=0))
            parts = zip(owns, pairwise(ends), strict=True)
            splits |= {own: partial(_rows, read, name, slice(*part)) for own, part in parts}
        for name, stacked in self.table.stacked.items():
            if name in names:
                for group, owns in enumerate(stacked.groups):
                    for place, own in enumerate(owns):
                        splits[own] = partial(_stacked, read, name, stacked, group, place)
        return splits

    def _split_names(self, names: Iterable[str]) -> list[str]:
        """Names in a file, with joined tensors replaced by the names of their parts."""
        joined = self._joined
        return [own for name in names for own in joined.get(name, (name,))]

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that a file has the weights of this model, from their shapes by the file's names.

        Raises:
            ValueError: as for `renamed`, or a weight has another shape.
        """
        shapes = shapes_without_blocks(shapes)
        sources = self._sources(self._split_names(shapes))
        expected = {w.name: w.shape for w in self.table.weights}
        for name, owns in self.table.fused.items():
            if name in shapes:
                rows, rest = sum(expected[own][0] for own in owns), expected[owns[0]][1:]
                check_shape(name, shapes[name], (rows, *rest))
        for name, stacked in self.table.stacked.items():
            if name in shapes:
                check_shape(name, shapes[name], stacked.shape(expected[stacked.weights[0]]))
        for own, shape in expected.items():
            if sources[own] in shapes:
                own_shape = shape[::-1] if sources[own] in self.table.turned else shape
                check_shape(sources[own], shapes[sources[own]], own_shape)

    def _sources(self, names: Iterable[str]) -> dict[str, str]:
        """Logical name to the name in a file that has the weights `names`."""
        sources: dict[str, str] = {}
        for name in names:
            own = self.table.aliases.get(name, name)
            if own not in sources or name == own:
                sources[own] = name
        needed = {w.name for w in self.table.weights}
        missing, unknown = needed - sources.keys(), sources.keys() - needed
        if missing or unknown:
            raise WeightsError(
                "the weights belong to a model of another kind or size than the configuration's: "
                f"missing {_some(missing)}, unknown {_some(unknown)}"
            )
        return sources


def _rows(read: Callable[[str], np.ndarray], name: str, rows: slice) -> np.ndarray:
    return read(name)[rows]


def _stacked(
    read: Callable[[str], np.ndarray], name: str, stacked: Stacked, group: int, place: int
) -> np.ndarray:
    return stacked.part(read(name), group, place)


def _same(
    read: Callable[[], np.ndarray], name: str, read_copy: Callable[[], np.ndarray], copy: str
) -> np.ndarray:
    """What `read` gives of `name`, if `copy` has the same."""
    value = read()
    if not np.array_equal(value, read_copy()):
        raise WeightsError(
            f"{name!r} and {copy!r} differ, but the configured model has one weight for both"
        )
    return value


def _joined(weights: Arrays, names: Sequence[str]) -> np.ndarray:
    return np.concatenate([weights[name] for name in names])


def _some(names: Iterable[str]) -> str:
    first, *rest = sorted(names) or ["none"]
    first = shown_name(first, 48)  # two of them, and a path, are in one sentence
    return f"{first} and {len(rest)} more" if rest else first
