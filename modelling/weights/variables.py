"""Logical tensors read from a program's variables, in full or in the parts that replicas hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from checkpoints.arrays import Arrays, LazyArrays, View
from checkpoints.tensor_shards import CutTensor, Layout, Part
from modelling.weights.mapping import WeightMapping
from popxl import Variable
from popxl.session import VariableShard

OPTIMIZER = "optimizer"
"""First part of the names of optimizer state: `optimizer/first_order/<weight>`."""

StoredArray = tuple[VariableShard, ...]


class VariableSource(NamedTuple):
    """A variable, and the row that says which logical tensors make it up."""

    mapping: WeightMapping
    variable: Any
    """For a weight in few bits, which is written only, the tree of its parts."""

    prefix: str
    """Prefix of the tensors' names, before the names of the weights."""

    is_shared: bool = False
    """True if all weights of the row share the data, as they share a step counter."""

    residual_of_dtype: np.dtype | None = None
    """The data are what rounding to this type takes from the weights."""

    @property
    def tensor_names(self) -> list[str]:
        """The names of the tensors."""
        return [self.prefix + weight.name for weight in self.mapping.weights]

    def shardings(self, held: StoredArray) -> tuple[WeightSharding, ...]:
        """How each tensor is cut, where the variable is held in parts."""
        mapping, shape = self.mapping, self.variable.shape
        if self.is_shared:
            return weight_shardings(VariableLayout((shape,), shape), held) * len(mapping.weights)
        return weight_shardings(VariableLayout.from_mapping(mapping, shape), held)


@dataclass(frozen=True)
class VariableLayout:
    """Where the elements of a row's weights are in its variable; see `WeightMapping`.

    Attributes:
        shapes: of the weights.
        variable: its shape on a replica.
    """

    shapes: tuple[tuple[int, ...], ...]
    variable: tuple[int, ...]
    transpose: bool = False
    axis: int | None = None
    expert_parallel: bool = False

    @classmethod
    def from_mapping(cls, mapping: WeightMapping, variable: tuple[int, ...]) -> VariableLayout:
        """The layout of a row's variable of some shape."""
        shapes = tuple(w.shape for w in mapping.weights)
        return cls(shapes, variable, mapping.transpose, mapping.axis, mapping.expert_parallel)

    def slices(self, group: int, start: int, size: int) -> Iterator[WeightSlice]:
        """Yield the elements of weights among consecutive elements of the variable.

        Args:
            group: which of the tensor-parallel parts the variable is.
            start, size: which of its elements, in C order.
        """
        if not self.variable:
            scalar = Part((), (), (), (), 0, 1)
            yield from (WeightSlice(i, scalar, 0, (0, 1, 1, 1)) for i in range(len(self.shapes)))
            return
        axis, count, first_weight = self.axis or 0, len(self.shapes), 0
        length, inner = self.variable[axis], math.prod(self.variable[axis + 1 :])
        if self.expert_parallel:
            own = self.shapes[0][-1 - axis if self.transpose else axis]
            count = length // own
            first_weight, group = group * count, 0
        for number in range(first_weight, first_weight + count):
            shape = self.shapes[number]
            box = list(reversed(shape) if self.transpose else shape)
            corner = [0] * len(box)
            corner[axis] = group * (length // count)
            box[axis] = max(min(length // count, box[axis] - corner[axis]), 0)  # without padding
            low = (number - first_weight) * (length // count)
            high = low + box[axis]

            def before(element: int, low: int = low, high: int = high) -> int:
                """How many elements of the weight come before one of the variable."""
                rows, rest = divmod(element, length * inner)
                inside = rest % inner if low <= rest // inner < high else 0
                columns = rows * (high - low) + min(max(rest // inner - low, 0), high - low)
                return columns * inner + inside

            first, end = before(start), before(start + size)
            if end > first:
                axes = range(len(box))
                order = tuple(reversed(axes) if self.transpose else axes)
                part = Part(shape, order, tuple(corner), tuple(box), first, end - first)
                yield WeightSlice(number, part, start, (low, high, length, inner))


@dataclass(frozen=True)
class WeightSlice:
    """The elements of one weight among consecutive elements of a row's variable.

    Attributes:
        weight: which of the row's weights.
        part: where they are in it.
    """

    weight: int
    part: Part
    _start: int
    _middle: tuple[int, int, int, int]
    """First and last index on the axis along which weights are joined; length, elements inside."""

    def select(self, values: np.ndarray) -> np.ndarray:
        """Return this weight's elements of all those elements."""
        low, high, length, inner = self._middle
        if high - low == length:
            return values
        first, offset = divmod(self._start, length * inner)
        rows = -(-(offset + values.size) // (length * inner))
        filled = np.zeros(rows * length * inner, values.dtype)
        filled[offset : offset + values.size] = values
        chosen = filled.reshape(rows, length, inner)[:, low:high].reshape(-1)
        begin = self.part.start - first * (high - low) * inner
        return chosen[begin : begin + self.part.size]


class WeightSharding(NamedTuple):
    """How one weight of a row is cut, where its variable is held in parts."""

    layout: Layout
    holders: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[VariableShard, WeightSlice], ...]

    @classmethod
    def from_sources(cls, sources: Sequence[tuple[VariableShard, WeightSlice]]) -> WeightSharding:
        """From the parts of the variable, and what each has of the weight."""
        layout = tuple(weight_slice.part for _, weight_slice in sources)
        return cls(layout, tuple(part.processes for part, _ in sources), tuple(sources))

    def read(
        self, variable: Variable, read: Callable[[Variable, VariableShard], np.ndarray], number: int
    ) -> np.ndarray:
        """The elements of a part of the weight."""
        part, weight_slice = self.sources[number]
        return weight_slice.select(read(variable, part))


@cache
def weight_shardings(layout: VariableLayout, held: StoredArray) -> tuple[WeightSharding, ...]:
    """How each weight of a row is cut. Equal layers share what this returns."""
    sources: list[list[tuple[VariableShard, WeightSlice]]] = [[] for _ in layout.shapes]
    for part in held:
        for weight_slice in layout.slices(part.group, part.start, part.size):
            sources[weight_slice.weight].append((part, weight_slice))
    return tuple(map(WeightSharding.from_sources, sources))


class ShardReader(NamedTuple):
    """Access to the parts of variables that the replicas hold; see `popxl.Session`."""

    shards_of: Callable[[Variable], tuple[VariableShard, ...]]
    read: Callable[[Variable, VariableShard], np.ndarray]


class HfNamedTensors(LazyArrays):
    """Logical tensors, made from a variable's data on demand. They come in the order of the
    variables: tensors of one variable follow each other, and are kept until each was asked for
    once.
    """

    concurrent = False

    def __init__(
        self,
        sources: Sequence[VariableSource],
        read: Callable[[Variable], np.ndarray],
        tensor_parallel: int,
        held: ShardReader | None,
    ) -> None:
        self._all, self._held = sources, held
        self._sources = {name: source for source in sources for name in source.tensor_names}
        self._names = self._sources
        self._read, self._tensor_parallel = read, tensor_parallel
        self._made: dict[str, np.ndarray] = {}

    def parts(self) -> Iterator[CutTensor]:
        """Like `ShardSource`: what the variables' parts hold of each tensor."""
        assert self._held is not None
        for source in self._all:
            variable, dtype = source.variable, source.variable.dtype.as_numpy()
            cuts = source.shardings(self._held.shards_of(variable))
            for name, cut in zip(source.tensor_names, cuts, strict=True):
                read = partial(cut.read, variable, self._held.read)
                yield CutTensor(name, dtype, cut.layout, cut.holders, read)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            math.prod(source.variable.shape if source.is_shared else weight.shape)
            * source.variable.dtype.as_numpy().itemsize
            for source in self._all
            for weight in source.mapping.weights
        )

    def without(self, prefix: str) -> HfNamedTensors:
        """All tensors but those whose names begin with `prefix`."""
        sources = [p for p in self._all if not p.prefix.startswith(prefix)]
        return HfNamedTensors(sources, self._read, self._tensor_parallel, self._held)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._made:
            source = self._sources[name]
            data = self._read(source.variable)
            if source.is_shared:
                self._made = dict.fromkeys(source.tensor_names, data)
            else:
                self._made = source.mapping.to_logical(data, self._tensor_parallel, source.prefix)
        return self._made.pop(name)


def without_optimizer_state(tensors: Arrays) -> Arrays:
    """All but the optimizer's state, on demand."""
    if isinstance(tensors, HfNamedTensors):
        return tensors.without(f"{OPTIMIZER}/")
    names = [name for name in tensors if not name.startswith(f"{OPTIMIZER}/")]
    return View(tensors, names)


def total_nbytes(tensors: Arrays) -> int:
    """Bytes of tensors, without reading those of a program."""
    if isinstance(tensors, HfNamedTensors):
        return tensors.nbytes
    return sum(array.nbytes for array in tensors.values())
