"""The names and shapes that a model's weights have in Hugging Face's files, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate, chain, pairwise
from typing import Literal

import numpy as np

from checkpoints.arrays import Arrays, LazyArrays, Overlay, View
from files.formatting import format_name
from modelling.weights.mapping import WeightsError, check_shape
from modelling.weights.mxfp4 import shapes_without_blocks, without_blocks

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class FusedWeights:
    """Weights that files have as one tensor, such as those of fused products or of experts.

    Attributes:
        groups: the weights of each matrix, joined along their first axis. Weights that are vectors
            make vectors.
        stack: axis along which there is a matrix for each group; -1: an element of each matrix in
            turn; None: there is one group.
        alternating: whether a matrix has weights' rows in turn, not those of one after those of
            another.
        transposed: whether matrices are (in features, out features).
        written: whether it is so in the files of exports, too.
    """

    groups: tuple[tuple[str, ...], ...]
    stack: Literal[0, -1] | None = None
    interleaved: bool = False
    transposed: bool = False
    in_exports: bool = True

    @classmethod
    def from_weights(cls, weights: Iterable[str]) -> FusedWeights:
        """Weights one after the other."""
        return cls((tuple(weights),))

    @property
    def weights(self) -> list[str]:
        """The weights of all matrices."""
        return list(chain(*self.groups))

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """The tensor's shape, by those of the weights."""
        first = self.groups[0]
        matrix = sum(shapes[name][0] for name in first), *shapes[first[0]][1:]
        if self.stack == -1:
            return (*matrix[:-1], matrix[-1] * len(self.groups))
        matrix = matrix[::-1] if self.transposed else matrix
        return matrix if self.stack is None else (len(self.groups), *matrix)

    def split(
        self, read: Callable[[], np.ndarray], shapes: Shapes
    ) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
        """Yield each weight, and what reads it as a part of the tensor."""
        for number, names in enumerate(self.groups):
            ends = accumulate((shapes[name][0] for name in names), initial=0)
            for place, (name, rows) in enumerate(zip(names, pairwise(ends), strict=True)):
                part = slice(place, None, len(names)) if self.interleaved else slice(*rows)
                yield name, partial(self._part, read, number, part)

    def _part(self, read: Callable[[], np.ndarray], number: int, rows: slice) -> np.ndarray:
        tensor = read()
        if self.stack is not None:
            tensor = tensor[number] if self.stack == 0 else tensor[..., number :: len(self.groups)]
        return (tensor.T if self.transposed else tensor)[rows]

    def join(self, weights: Arrays) -> np.ndarray:
        """The tensor."""
        matrices = [self._matrix([weights[name] for name in names]) for names in self.groups]
        if self.stack is None:
            return matrices[0]
        tensor = np.stack(matrices, self.stack)
        return tensor if self.stack == 0 else tensor.reshape(*tensor.shape[:-2], -1)

    def _matrix(self, parts: list[np.ndarray]) -> np.ndarray:
        if self.interleaved:
            matrix = np.stack(parts, 1).reshape(-1, *parts[0].shape[1:])
        else:
            matrix = np.concatenate(parts)
        return matrix.T if self.transposed else matrix


@dataclass(frozen=True)
class HfTensorNames:
    """Tensors that files may have in place of weights under their logical names.

    Attributes:
        aliases: other names of weights, with their logical ones.
        turned: those of them that are of the transpose.
        joined: tensors that several weights are joined in, by name.
        buffers: weights that files may lack, which are then zeros.
    """

    aliases: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, FusedWeights] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()

    def __or__(self, other: HfTensorNames) -> HfTensorNames:
        return HfTensorNames(
            {**self.aliases, **other.aliases},
            {**self.fused, **other.fused},
            self.transposed | other.transposed,
            self.buffers | other.buffers,
        )

    def subset(self, names: Collection[str]) -> HfTensorNames:
        """Those of some weights alone."""
        aliases = {alias: name for alias, name in self.aliases.items() if name in names}
        fused = {n: x for n, x in self.fused.items() if all(own in names for own in x.weights)}
        return HfTensorNames(aliases, fused, self.transposed, self.buffers & {*names})

    def from_hf(self, tensors: Arrays, shapes: Shapes) -> Arrays:
        """The weights of a file under their logical names; each is read when asked for.

        Args:
            shapes: of all weights.

        Raises:
            ValueError: a weight is missing, or there is an unknown one; when one is read that a
                file has under several names, they differ.
        """
        tensors = without_blocks(tensors)
        names = self._split_names(tensors)
        sources = self._sources(names, shapes)
        read = lru_cache(1)(tensors.__getitem__)  # the parts of one follow each other
        makers: dict[str, Callable[[], np.ndarray]] = {
            own: partial(self._read_weight, tensors, name) for own, name in sources.items()
        }
        lacking = self.buffers - sources.keys()
        makers |= {name: partial(np.zeros, shapes[name], np.float32) for name in lacking}
        for name, fused in self.fused.items():
            if name in tensors:
                makers |= fused.split(partial(read, name), shapes)
        for name in names:
            own = self.aliases.get(name)
            if own is not None and sources[own] != name:
                copy = partial(self._read_weight, tensors, name)
                makers[own] = partial(_same, makers[own], sources[own], copy, name)
        return LazyArrays(makers)

    def to_hf(self, weights: Arrays) -> Arrays:
        """The inverse of `from_hf`: logical weights as files have them."""
        fused = {name: x for name, x in self.fused.items() if x.in_exports}
        parts = {own for x in fused.values() for own in x.weights}
        makers = {
            name: partial(x.join, weights)
            for name, x in fused.items()
            if all(own in weights for own in x.weights)
        }
        return Overlay(LazyArrays(makers), View(weights, [n for n in weights if n not in parts]))

    def check_shapes(self, found: Shapes, shapes: Shapes) -> None:
        """Check that a file has the weights of this model, from their shapes by the file's names.

        Args:
            shapes: of all weights.

        Raises:
            ValueError: as for `from_hf`, or a weight has another shape.
        """
        found = shapes_without_blocks(found)
        sources = self._sources(self._split_names(found), shapes)
        for name, fused in self.fused.items():
            if name in found:
                check_shape(name, found[name], fused.shape(shapes))
        for own, shape in shapes.items():
            if sources.get(own) in found:
                own_shape = shape[::-1] if sources[own] in self.transposed else shape
                check_shape(sources[own], found[sources[own]], own_shape)

    def _read_weight(self, tensors: Arrays, name: str) -> np.ndarray:
        """A tensor of a file as its logical weight is."""
        return tensors[name].T if name in self.transposed else tensors[name]

    def _split_names(self, names: Iterable[str]) -> list[str]:
        """Names in a file, with joined tensors replaced by the names of their parts."""
        return [
            own
            for name in names
            for own in (self.fused[name].weights if name in self.fused else [name])
        ]

    def _sources(self, names: Iterable[str], shapes: Shapes) -> dict[str, str]:
        """Logical name to the name in a file that has the weights `names`."""
        sources: dict[str, str] = {}
        for name in names:
            own = self.aliases.get(name, name)
            if own not in sources or name == own:
                sources[own] = name
        missing, unknown = shapes.keys() - sources.keys(), sources.keys() - shapes.keys()
        missing -= self.buffers
        if missing or unknown:
            raise WeightsError(
                "the weights belong to a model of another kind or size than the configuration's: "
                f"missing {_some(missing)}, unknown {_some(unknown)}"
            )
        return sources


def _same(
    read: Callable[[], np.ndarray], name: str, read_copy: Callable[[], np.ndarray], copy: str
) -> np.ndarray:
    """The tensor `name` of `read`, if `copy` has the same."""
    value = read()
    if not np.array_equal(value, read_copy()):
        raise WeightsError(
            f"{name!r} and {copy!r} differ, but the configured model has one weight for both"
        )
    return value


def _some(names: Iterable[str]) -> str:
    first, *rest = sorted(names) or ["none"]
    first = format_name(first, 48)  # two of them, and a path, are in one sentence
    return f"{first} and {len(rest)} more" if rest else first
