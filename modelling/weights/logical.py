"""Logical tensors read from a program's variables, whole or in the parts that replicas hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from checkpoints.arrays import Arrays, LazyArrays, View
from checkpoints.tensor_shards import CutTensor, Layout
from modelling.weights.row import Weight, WeightRow
from modelling.weights.row_parts import RowPart, parts_in_row
from popxl import Variable
from popxl.session import VariablePart

OPTIMIZER = "optimizer"
"""First part of the names of optimizer state: `optimizer/first_order/<weight>`."""


class VariableRow(NamedTuple):
    """A variable, and the row that says which logical tensors make it up."""

    row: WeightRow
    variable: Any
    """For a weight in few bits, which is written only, the tree of its parts."""

    prefix: str
    """Prefix of the tensors' names, before the names of the weights."""

    common: bool = False
    """Whether all weights of the row share the data, as they share a step counter."""

    rest_of: np.dtype | None = None
    """The data are what rounding to this type takes from the weights."""


class HeldParts(NamedTuple):
    """Access to the parts of variables that the replicas hold; see `popxl.Session`."""

    of: Callable[[Variable], tuple[VariablePart, ...]]
    read: Callable[[Variable, VariablePart], np.ndarray]


class LogicalTensors(LazyArrays):
    """Logical tensors, made from a variable's data on demand. They come in the order of the
    variables: tensors of one variable follow each other, and are kept until each was asked for
    once.
    """

    concurrent = False

    def __init__(
        self,
        places: Sequence[VariableRow],
        read: Callable[[Variable], np.ndarray],
        tensor_parallel: int,
        held: HeldParts | None,
    ) -> None:
        self._all, self._held = places, held
        self._places = {p.prefix + w.name: p for p in places for w in p.row.weights}
        self._names = self._places
        self._read, self._tensor_parallel = read, tensor_parallel
        self._made: dict[str, np.ndarray] = {}

    def parts(self) -> Iterator[CutTensor]:
        """Like `ShardSource`: what the variables' parts hold of each tensor."""
        assert self._held is not None
        for row, variable, prefix, common, _ in self._all:
            dtype = variable.dtype.as_numpy()
            cuts = cuts_of(VariableLayout.of(row, variable, common), self._held.of(variable))
            for weight, cut in zip(row.weights, cuts, strict=True):
                read = partial(_read_part, cut.sources, variable, self._held.read)
                yield CutTensor(prefix + weight.name, dtype, cut.layout, cut.holders, read)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            math.prod(place.variable.shape if place.common else weight.shape)
            * place.variable.dtype.as_numpy().itemsize
            for place in self._all
            for weight in place.row.weights
        )

    def without(self, prefix: str) -> LogicalTensors:
        """All tensors but those whose names begin with `prefix`."""
        places = [p for p in self._all if not p.prefix.startswith(prefix)]
        return LogicalTensors(places, self._read, self._tensor_parallel, self._held)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._made:
            row, variable, prefix, common, _ = self._places[name]
            data = self._read(variable)
            if common:
                self._made = {prefix + w.name: data for w in row.weights}
            else:
                self._made = row.to_logical(data, self._tensor_parallel, prefix)
        return self._made.pop(name)


class VariableLayout(NamedTuple):
    """What decides where the elements of a row's weights are in its variable."""

    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the weights."""

    transpose: bool
    axis: int | None
    shared_out: bool
    common: bool
    variable: tuple[int, ...]
    """Its shape on a replica."""

    @classmethod
    def of(cls, row: WeightRow, variable: Variable, common: bool) -> VariableLayout:
        """The form of a place's variable."""
        shapes = tuple(w.shape for w in row.weights)
        return cls(shapes, row.transpose, row.axis, row.shared_out, common, variable.shape)


class _Cut(NamedTuple):
    """How one weight of a row is cut, where its variable is held in parts."""

    layout: Layout
    holders: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[VariablePart, RowPart], ...]


@cache
def cuts_of(form: VariableLayout, held: tuple[VariablePart, ...]) -> tuple[_Cut, ...]:
    """How each weight of a row is cut. Layers that are alike share what this returns."""
    if form.common:
        alone = VariableLayout((form.variable,), False, None, False, False, form.variable)
        return cuts_of(alone, held) * len(form.shapes)
    weights = tuple(Weight("", shape) for shape in form.shapes)
    row = WeightRow("", weights, form.transpose, form.axis, shared_out=form.shared_out)
    sources: list[list[tuple[VariablePart, RowPart]]] = [[] for _ in form.shapes]
    for part in held:
        for row_part in parts_in_row(row, form.variable, part.group, part.start, part.size):
            sources[row_part.weight].append((part, row_part))
    return tuple(
        _Cut(
            tuple(row_part.part for _, row_part in of_one),
            tuple(part.processes for part, _ in of_one),
            tuple(of_one),
        )
        for of_one in sources
    )


def _read_part(
    sources: Sequence[tuple[VariablePart, RowPart]],
    variable: Variable,
    read: Callable[[Variable, VariablePart], np.ndarray],
    number: int,
) -> np.ndarray:
    part, row_part = sources[number]
    return row_part.taken(read(variable, part))


def without_optimizer(tensors: Arrays) -> Arrays:
    """All but the optimizer's state, on demand."""
    if isinstance(tensors, LogicalTensors):
        return tensors.without(f"{OPTIMIZER}/")
    names = [name for name in tensors if not name.startswith(f"{OPTIMIZER}/")]
    return View(tensors, names)


def nbytes_of(tensors: Arrays) -> int:
    """Bytes of tensors, without reading those of a program."""
    if isinstance(tensors, LogicalTensors):
        return tensors.nbytes
    return sum(array.nbytes for array in tensors.values())
