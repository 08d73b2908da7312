"""Logical tensors read from a program's variables, in full or shard by shard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from checkpoints.lazy_arrays import Arrays, ArraysView, LazyArrays
from modelling.weights.weight_mapping import WeightMapping
from popxl import Variable
from popxl.session import VariableShard

if TYPE_CHECKING:
    from checkpoints.tensor_shards import ShardedTensor, ShardLayout, TensorShard

OPTIMIZER_PREFIX = "optimizer"
"""Prefix of the names of optimizer state: `optimizer/first_order/<weight>`."""

LocalShards = tuple[VariableShard, ...]


class VariableSource(NamedTuple):
    """A variable of a program, with the mapping of the logical tensors that it consists of."""

    mapping: WeightMapping
    variable: Any
    """The variable; for a quantized weight, which is only written, the tree of its fields."""

    prefix: str
    """Prefix of the tensors' names; the names of the weights follow."""

    is_shared: bool = False
    """True if all weights of the mapping share the data, like a step counter."""

    residual_of_dtype: np.dtype | None = None
    """Not None: the data are the residuals of rounding the weights to this dtype."""

    @property
    def tensor_names(self) -> list[str]:
        """Names of the logical tensors that make up the variable."""
        return [self.prefix + weight.name for weight in self.mapping.weights]

    def shardings(self, shards: LocalShards) -> tuple[WeightSharding, ...]:
        """Sharding of each logical tensor in the variable, which is stored in `shards` shards."""
        mapping, shape = self.mapping, self.variable.shape
        if self.is_shared:
            return weight_shardings(VariableLayout((shape,), shape), shards) * len(mapping.weights)
        return weight_shardings(VariableLayout.from_mapping(mapping, shape), shards)


@dataclass(frozen=True)
class VariableLayout:
    """Positions of logical weights' elements in a variable, which may concatenate several.

    Attributes:
        shapes: shapes of the weights.
        variable: shape of the variable on a replica.
    """

    shapes: tuple[tuple[int, ...], ...]
    variable: tuple[int, ...]
    transpose: bool = False
    axis: int | None = None
    expert_parallel: bool = False

    @classmethod
    def from_mapping(cls, mapping: WeightMapping, variable: tuple[int, ...]) -> VariableLayout:
        """Returns the layout of a mapping's variable, given the variable's shape on a replica."""
        shapes = tuple(w.shape for w in mapping.weights)
        return cls(shapes, variable, mapping.transpose, mapping.axis, mapping.expert_parallel)

    def weight_slices(self, group: int, start: int, size: int) -> Iterator[WeightSlice]:
        """Yield each weight's slice of a range of consecutive elements of the variable.

        Args:
            group: index of the tensor-parallel shard.
            start: index of the first element, in C order.
            size: number of elements.
        """
        from checkpoints.tensor_shards import TensorShard

        if not self.variable:
            scalar = TensorShard((), (), (), (), 0, 1)
            yield from (WeightSlice(i, scalar, 0, (0, 1, 1, 1)) for i in range(len(self.shapes)))
            return
        axis, count, first_weight = self.axis or 0, len(self.shapes), 0
        length, inner = self.variable[axis], math.prod(self.variable[axis + 1 :])
        if self.expert_parallel:
            weight_length = self.shapes[0][-1 - axis if self.transpose else axis]
            count = length // weight_length
            first_weight, group = group * count, 0
        for weight_index in range(first_weight, first_weight + count):
            shape = self.shapes[weight_index]
            box = list(reversed(shape) if self.transpose else shape)
            offsets = [0] * len(box)
            offsets[axis] = group * (length // count)
            box[axis] = max(min(length // count, box[axis] - offsets[axis]), 0)  # without padding
            low = (weight_index - first_weight) * (length // count)
            high = low + box[axis]

            def elements_before(element: int, low: int = low, high: int = high) -> int:
                """Count of the weight's elements that come before an element of the variable."""
                rows, rest = divmod(element, length * inner)
                inside = rest % inner if low <= rest // inner < high else 0
                columns = rows * (high - low) + min(max(rest // inner - low, 0), high - low)
                return columns * inner + inside

            first, end = elements_before(start), elements_before(start + size)
            if end > first:
                axes = range(len(box))
                order = tuple(reversed(axes) if self.transpose else axes)
                part = TensorShard(shape, order, tuple(offsets), tuple(box), first, end - first)
                yield WeightSlice(weight_index, part, start, (low, high, length, inner))


@dataclass(frozen=True)
class WeightSlice:
    """Elements of one logical weight within a range of consecutive elements of a variable.

    Attributes:
        weight: index of the weight in the mapping.
        part: position of the elements in the weight.
    """

    weight: int
    part: TensorShard
    _start: int
    _axis_range: tuple[int, int, int, int]
    """Range on the axis along which weights are concatenated, its length, and inner elements."""

    def select_elements(self, values: np.ndarray) -> np.ndarray:
        """Select the weight's elements from consecutive elements of the variable."""
        low, high, length, inner = self._axis_range
        if high - low == length:
            return values
        first, offset = divmod(self._start, length * inner)
        rows = -(-(offset + values.size) // (length * inner))
        padded = np.zeros(rows * length * inner, values.dtype)
        padded[offset : offset + values.size] = values
        elements = padded.reshape(rows, length, inner)[:, low:high].reshape(-1)
        start = self.part.start - first * (high - low) * inner
        return elements[start : start + self.part.length]


class WeightSharding(NamedTuple):
    """Shards of one logical weight, as the shards of its variable cut it."""

    layout: ShardLayout
    processes: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[VariableShard, WeightSlice], ...]

    @classmethod
    def from_sources(cls, sources: Sequence[tuple[VariableShard, WeightSlice]]) -> WeightSharding:
        """Returns the sharding of a weight from the variable's shards and its slices in them."""
        layout = tuple(weight_slice.part for _, weight_slice in sources)
        return cls(layout, tuple(shard.processes for shard, _ in sources), tuple(sources))

    def read_shard(
        self,
        variable: Variable,
        read_variable_shard: Callable[[Variable, VariableShard], np.ndarray],
        shard_index: int,
    ) -> np.ndarray:
        """Read those elements of the weight that are in shard number `shard_index`."""
        shard, weight_slice = self.sources[shard_index]
        return weight_slice.select_elements(read_variable_shard(variable, shard))


@cache
def weight_shardings(layout: VariableLayout, shards: LocalShards) -> tuple[WeightSharding, ...]:
    """Shardings of all weights of a layout; cached for layers with equal layouts."""
    sources: list[list[tuple[VariableShard, WeightSlice]]] = [[] for _ in layout.shapes]
    for shard in shards:
        for weight_slice in layout.weight_slices(shard.group, shard.start, shard.size):
            sources[weight_slice.weight].append((shard, weight_slice))
    return tuple(map(WeightSharding.from_sources, sources))


class ShardReader(NamedTuple):
    """Functions that list and read the shards of variables on this process; see `popxl.Session`."""

    shards_of: Callable[[Variable], tuple[VariableShard, ...]]
    read: Callable[[Variable, VariableShard], np.ndarray]


class HfNamedTensors(LazyArrays):
    """Lazy mapping of names to logical tensors, converted from variables when read.

    Tensors of one variable are consecutive; each is cached until it has been read once.
    """

    is_thread_safe = False

    def __init__(
        self,
        sources: Sequence[VariableSource],
        read: Callable[[Variable], np.ndarray],
        tensor_parallel: int,
        shard_reader: ShardReader | None,
    ) -> None:
        self._all, self._shard_reader = sources, shard_reader
        self._sources = {name: source for source in sources for name in source.tensor_names}
        self._names = self._sources
        self._read, self._tensor_parallel = read, tensor_parallel
        self._cached: dict[str, np.ndarray] = {}

    def sharded_tensors(self) -> Iterator[ShardedTensor]:
        """Yields all tensors with their shards, as checkpoints store them (`ShardSource`)."""
        assert self._shard_reader is not None
        for source in self._all:
            variable, dtype = source.variable, source.variable.dtype.as_numpy()
            shardings = source.shardings(self._shard_reader.shards_of(variable))
            for name, sharding in zip(source.tensor_names, shardings, strict=True):
                from checkpoints.tensor_shards import ShardedTensor

                read = partial(sharding.read_shard, variable, self._shard_reader.read)
                yield ShardedTensor(name, dtype, sharding.layout, sharding.processes, read)

    @property
    def nbytes(self) -> int:
        """Total size of all tensors in bytes."""
        return sum(
            math.prod(source.variable.shape if source.is_shared else weight.shape)
            * source.variable.dtype.as_numpy().itemsize
            for source in self._all
            for weight in source.mapping.weights
        )

    def without_prefix(self, prefix: str) -> HfNamedTensors:
        """Returns the tensors whose names do not start with `prefix`."""
        sources = [source for source in self._all if not source.prefix.startswith(prefix)]
        return HfNamedTensors(sources, self._read, self._tensor_parallel, self._shard_reader)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._cached:
            source = self._sources[name]
            data = self._read(source.variable)
            if source.is_shared:
                self._cached = dict.fromkeys(source.tensor_names, data)
            else:
                self._cached = source.mapping.to_logical_weights(
                    data, self._tensor_parallel, source.prefix
                )
        return self._cached.pop(name)


def without_optimizer_state(tensors: Arrays) -> Arrays:
    """Returns the tensors that are not optimizer state, still lazy."""
    if isinstance(tensors, HfNamedTensors):
        return tensors.without_prefix(f"{OPTIMIZER_PREFIX}/")
    names = [name for name in tensors if not name.startswith(f"{OPTIMIZER_PREFIX}/")]
    return ArraysView(tensors, names)


def total_nbytes(tensors: Arrays) -> int:
    """Total bytes of tensors; sizes of a program's variables are known without reading them."""
    if isinstance(tensors, HfNamedTensors):
        return tensors.nbytes
    return sum(array.nbytes for array in tensors.values())
