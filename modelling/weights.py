"""One table of weights, read in both directions.

A model's weights have names and shapes of their own, independent of how a program lays them out:
the *logical* weights, with Hugging Face's names. A row of the table says which logical weights make
up a variable of ours. The same rows convert weights, and tensors of the same shapes such as the
optimizer's moments, to variables and back, and hold the rules for initial values.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from checkpoints.parts import CutTensor, Layout, PartialReader
from config.errors import UserError
from config.optimizers import MASTER, SLOTS
from files.shown import shown_name
from modelling.quantisation import quantised
from modelling.row_parts import RowPart, parts_in_row
from popxl import Variable
from popxl.session import OnDemand, VariablePart
from popxl_addons import NamedTensors
from popxl_addons.array_munging import pad_axis, shard

Arrays = Mapping[str, np.ndarray]
Variables = Mapping[str, NamedTensors | Sequence[NamedTensors]]
"""A program's variables: by layer, or by phase for each of its layers, the trees `fwd` (variables),
`optim` (their optimizer state, by variable) and `grad` (their gradients), as far as there are."""

OPTIMIZER = "optimizer"
"""First part of the names of optimizer state: `optimizer/first_order/<weight>`."""
FP8 = "fp8"
"""First part of the names of the FP8 state of linear layers: `fp8/scale/<weight>`."""


class WeightsError(UserError, ValueError):
    """Weights or state that belong to another model or program than the configured one."""


@dataclass(frozen=True)
class Weight:
    """A logical weight.

    Attributes:
        name: Hugging Face's.
        shape: Hugging Face's.
        std: standard deviation of its initial values around 0 (0: they are 0); None: they are 1.
    """

    name: str
    shape: tuple[int, ...]
    std: float | None = None

    def initial(self, seed: int) -> np.ndarray:
        """Initial values, float32: a function of the seed and the name alone."""
        if self.std is None:
            return np.ones(self.shape, np.float32)
        if self.std == 0:
            return np.zeros(self.shape, np.float32)
        digest = hashlib.sha256(self.name.encode()).digest()
        generator = np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])
        values = generator.standard_normal(self.shape, np.float32)
        values *= np.float32(self.std)
        return values


@dataclass(frozen=True)
class Row:
    """How a variable is made of logical weights.

    Attributes:
        path: of the variable in its layer's tree of variables.
        weights: joined along `axis`; each replica joins its own parts. Several weights need `axis`.
        transpose: whether the variable is (in, out), while the logical weights are (out, in).
        axis: of the variable, cut over tensor parallelism; the last part is padded with zeros if
            it is shorter. None: the whole is on every replica.
        cut: whether it is; if not, weights joined along `axis` are whole on every replica.
        holders: neighbours of a tensor-parallel group that have the same part, see `Groups`.
        trained: whether training changes it. If not, it is frozen: it is loaded, and never written
            back, and has no gradient and no optimizer state.
    """

    path: str
    weights: tuple[Weight, ...]
    transpose: bool = False
    axis: int | None = None
    cut: bool = True
    holders: int = 1
    trained: bool = True

    @classmethod
    def linear(
        cls, path: str, *weights: Weight, cut: Literal["in", "out"], holders: int = 1
    ) -> Row:
        """The weight of the linear map in `path`: the "in" or the "out" features are cut."""
        axis = 0 if cut == "in" else 1
        return cls(f"{path}.weight", weights, transpose=True, axis=axis, holders=holders)

    def _parts(self, tensor_parallel: int) -> int:
        """Into how many parts the weights are cut."""
        return tensor_parallel // self.holders if self.cut else 1

    def to_host(self, logical: Arrays, tensor_parallel: int, prefix: str = "") -> np.ndarray:
        """The variable's host data; dtypes stay.

        Args:
            logical: arrays by name, `prefix` and a weight's name.

        Returns:
            Array of the variable's shape on a replica, after an axis for the shards if there are
            several.

        Raises:
            ValueError: an array is missing or has the wrong shape.
        """
        arrays = [self._turned(_checked(w, logical, prefix)) for w in self.weights]
        if self.axis is None:
            (array,) = arrays
            return array
        tensor_parallel = self._parts(tensor_parallel)
        cut = [_shards(array, self.axis, tensor_parallel) for array in arrays]
        data = cut[0] if len(cut) == 1 else np.concatenate(cut, 1 + self.axis)
        return data if tensor_parallel > 1 else data[0]

    def to_logical(
        self, data: np.ndarray, tensor_parallel: int, prefix: str = ""
    ) -> dict[str, np.ndarray]:
        """The inverse of `to_host`. Padding is dropped."""
        if self.axis is None:
            return {prefix + self.weights[0].name: self._turned(data)}
        tensor_parallel = self._parts(tensor_parallel)
        shards = data if tensor_parallel > 1 else data[None]
        parts = np.split(shards, len(self.weights), 1 + self.axis)
        out = {}
        for weight, part in zip(self.weights, parts, strict=True):
            whole = np.concatenate(list(part), self.axis)
            shape = weight.shape[::-1] if self.transpose else weight.shape
            out[prefix + weight.name] = self._turned(whole[tuple(map(slice, shape))])
        return out

    def means(self, axis: int) -> Row:
        """The row of a vector along `axis` of this row's variable, a matrix for each weight."""
        size = 1 - axis if self.transpose else axis
        weights = tuple(replace(w, shape=(w.shape[size],)) for w in self.weights)
        return Row(self.path, weights, axis=0, cut=axis == self.axis, holders=self.holders)

    def _turned(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array.T if self.transpose else array)


def _checked(weight: Weight, logical: Arrays, prefix: str) -> np.ndarray:
    name = prefix + weight.name
    _check_presence(name, logical)
    array = np.asarray(logical[name])
    _check_shape(name, array.shape, weight.shape)
    return array


def _check_presence(name: str, logical: Arrays) -> None:
    if name not in logical:
        raise WeightsError(
            f"{name!r} is missing: the weights belong to a model of another kind or size than the "
            "configuration's"
        )


def _check_shape(name: str, shape: tuple[int, ...], needed: tuple[int, ...]) -> None:
    if shape != needed:
        raise WeightsError(f"{name!r} has shape {shape}, but the configuration needs {needed}")


def _shards(array: np.ndarray, axis: int, count: int) -> np.ndarray:
    """(count, ...): equal parts along `axis`, the last padded with zeros."""
    if count == 1:
        return array[None]
    length = -(-array.shape[axis] // count) * count
    return shard(pad_axis(array, length, axis), count, axis)


class Computed(Mapping[str, np.ndarray]):
    """Arrays made on demand, so that not all of them have to be in memory."""

    concurrent: ClassVar[bool] = True
    """Several threads may ask for some at a time."""

    def __init__(self, makers: Mapping[str, Callable[[], np.ndarray]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> np.ndarray:
        return self._makers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


class _Place(NamedTuple):
    """A variable, and the row that says which logical tensors make it up."""

    row: Row
    variable: Any
    """For a weight in 4 bits, which is written only, the tree of its parts."""

    prefix: str
    """Prefix of the tensors' names, before the names of the weights."""

    common: bool = False
    """Whether all weights of the row share the data, as they share a step counter."""


class _QuantisedParts:
    """The parts of a weight in 4 bits, which are made together and handed out one by one."""

    def __init__(self, whole: Callable[[], np.ndarray], parts: NamedTensors) -> None:
        self._whole, self._parts = whole, parts
        self._made: dict[Variable, np.ndarray] = {}
        self._lock = threading.Lock()

    @property
    def variables(self) -> list[Variable]:
        """The parts' variables."""
        return [v for v in self._parts.tensors if isinstance(v, Variable)]

    def of(self, variable: Variable) -> np.ndarray:
        """The data of one part."""
        with self._lock:
            if variable not in self._made:
                self._made = quantised(self._whole(), self._parts)
            return self._made.pop(variable)


class HeldParts(NamedTuple):
    """Access to the parts of variables that the replicas hold; see `popxl.Session`."""

    of: Callable[[Variable], tuple[VariablePart, ...]]
    read: Callable[[Variable, VariablePart], np.ndarray]


class _Logical(Mapping[str, np.ndarray]):
    """Logical tensors, made from a variable's data on demand. They come in the order of the
    variables: tensors of one variable follow each other, and are kept until each was asked for
    once.
    """

    def __init__(
        self,
        places: Sequence[_Place],
        read: Callable[[Variable], np.ndarray],
        tensor_parallel: int,
        held: HeldParts | None,
    ) -> None:
        self._all, self._held = places, held
        self._places = {p.prefix + w.name: p for p in places for w in p.row.weights}
        self._read, self._tensor_parallel = read, tensor_parallel
        self._made: dict[str, np.ndarray] = {}

    def parts(self) -> Iterator[CutTensor]:
        """As `ShardSource`: what the variables' parts hold of each tensor."""
        assert self._held is not None
        for row, variable, prefix, common in self._all:
            dtype = variable.dtype.as_numpy()
            cuts = _cut(_Form.of(row, variable, common), self._held.of(variable))
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

    def without(self, prefix: str) -> _Logical:
        """The same without the tensors whose names begin with `prefix`."""
        places = [p for p in self._all if not p.prefix.startswith(prefix)]
        return _Logical(places, self._read, self._tensor_parallel, self._held)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._made:
            row, variable, prefix, common = self._places[name]
            data = self._read(variable)
            if common:
                self._made = {prefix + w.name: data for w in row.weights}
            else:
                self._made = row.to_logical(data, self._tensor_parallel, prefix)
        return self._made.pop(name)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class _Form(NamedTuple):
    """What decides where the elements of a row's weights are in its variable."""

    shapes: tuple[tuple[int, ...], ...]
    """Of the weights."""

    transpose: bool
    axis: int | None
    common: bool
    variable: tuple[int, ...]
    """Its shape on a replica."""

    @classmethod
    def of(cls, row: Row, variable: Variable, common: bool) -> _Form:
        """That of a place."""
        shapes = tuple(w.shape for w in row.weights)
        return cls(shapes, row.transpose, row.axis, common, variable.shape)


class _Cut(NamedTuple):
    """How one weight of a row is cut, where its variable is held in parts."""

    layout: Layout
    holders: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[VariablePart, RowPart], ...]


@cache
def _cut(form: _Form, held: tuple[VariablePart, ...]) -> tuple[_Cut, ...]:
    """How each weight of a row is cut. Layers that are alike share what this returns."""
    if form.common:
        alone = _Form((form.variable,), False, None, False, form.variable)
        return _cut(alone, held) * len(form.shapes)
    row = Row("", tuple(Weight("", shape) for shape in form.shapes), form.transpose, form.axis)
    sources: list[list[tuple[VariablePart, RowPart]]] = [[] for _ in form.shapes]
    for part in held:
        for found in parts_in_row(row, form.variable, part.group, part.start, part.size):
            sources[found.weight].append((part, found))
    return tuple(
        _Cut(
            tuple(found.part for _, found in of_one),
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
    part, found = sources[number]
    return found.taken(read(variable, part))


@dataclass(frozen=True)
class WeightTable:
    """All weights of a model.

    Attributes:
        layers: rows of each layer, in the order of the forward pass. A variable that several
            layers use is a row of the one that owns it.
        phases: names of the layers of each phase of a phased program.
        tensor_parallel: number of parts that sharded variables are cut into.
        aliases: other names of logical weights that files may have, by alias.
        ignored: names of tensors in files that are no weights.
        fused: logical weights that files have as one, joined along the first axis, by its name.
    """

    layers: Mapping[str, tuple[Row, ...]]
    phases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tensor_parallel: int = 1
    aliases: Mapping[str, str] = field(default_factory=dict)
    ignored: Collection[str] = ()
    fused: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Every logical weight once."""
        return tuple(w for rows in self.layers.values() for row in rows for w in row.weights)

    @property
    def trained(self) -> tuple[Weight, ...]:
        """The logical weights that training changes."""
        rows = (row for rows in self.layers.values() for row in rows if row.trained)
        return tuple(w for row in rows for w in row.weights)

    # ---- logical weights ------------------------------------------------------------------------
    def initial(self, seed: int) -> Arrays:
        """Initial weights by name, float32, made when asked for. No layout changes them."""
        return Computed({w.name: partial(w.initial, seed) for w in self.weights})

    def renamed(self, tensors: Arrays) -> Arrays:
        """The weights of a file under their logical names; each is read when asked for.

        Raises:
            ValueError: a weight is missing, or there is an unknown one; when one is read that a
                file has under several names, they differ.
        """
        names = self._split_names(tensors)
        sources, split = self._sources(names), self._splits()
        made = {
            own: partial(_part_of, tensors, *split.get(name, (name, None)))
            for own, name in sources.items()
        }
        for name in names:
            own = self.aliases.get(name)
            if own is not None and sources[own] != name:
                made[own] = partial(_same, made[own], sources[own], tensors, name)
        return Computed(made)

    def for_files(self, weights: Arrays) -> Arrays:
        """The inverse of `renamed`: logical weights as files have them."""
        joined = {own for names in self.fused.values() for own in names}
        makers = {n: partial(weights.__getitem__, n) for n in weights if n not in joined}
        for name, owns in self.fused.items():
            if all(own in weights for own in owns):
                makers[name] = partial(_joined, weights, owns)
        return Computed(makers)

    def _splits(self) -> dict[str, tuple[str, slice]]:
        """For each logical weight that files join with others: the tensor, and its rows there."""
        shapes = {w.name: w.shape for w in self.weights if self.fused}
        found: dict[str, tuple[str, slice]] = {}
        for name, owns in self.fused.items():
            ends = list(accumulate((shapes[own][0] for own in owns), initial=0))
            parts = zip(owns, pairwise(ends), strict=True)
            found |= {own: (name, slice(*part)) for own, part in parts}
        return found

    def _split_names(self, names: Iterable[str]) -> list[str]:
        """Names in a file, with joined tensors replaced by the names of their parts."""
        return [own for name in names for own in self.fused.get(name, (name,))]

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that a file has the weights of this model, from their shapes by the file's names.

        Raises:
            ValueError: as for `renamed`, or a weight has another shape.
        """
        sources = self._sources(self._split_names(shapes))
        expected = {w.name: w.shape for w in self.weights}
        for name, owns in self.fused.items():
            if name in shapes:
                rows = sum(expected[own][0] for own in owns)
                _check_shape(name, shapes[name], (rows, *expected[owns[0]][1:]))
        for own, shape in expected.items():
            if sources[own] in shapes:
                _check_shape(sources[own], shapes[sources[own]], shape)

    def _sources(self, names: Iterable[str]) -> dict[str, str]:
        """Logical name to the name in a file that has the weights `names`."""
        found: dict[str, str] = {}
        for name in (n for n in names if n not in self.ignored):
            own = self.aliases.get(name, name)
            if own not in found or name == own:
                found[own] = name
        needed = {w.name for w in self.weights}
        missing, unknown = needed - found.keys(), found.keys() - needed
        if missing or unknown:
            raise WeightsError(
                "the weights belong to a model of another kind or size than the configuration's: "
                f"missing {_some(missing)}, unknown {_some(unknown)}"
            )
        return found

    # ---- variables ------------------------------------------------------------------------------
    def to_variables(
        self, tensors: Arrays, variables: Variables
    ) -> dict[Variable, Callable[[], np.ndarray]]:
        """Functions that make the host data of a program's variables from logical tensors.

        They read the tensors they need, and raise WeightsError if one has the wrong shape. Of
        tensors in ranges (`PartialReader`) a process reads the elements that its devices hold.

        Args:
            tensors: weights by name; if there is optimizer state among them (see `OPTIMIZER`), or
                FP8 state, and in the program, it is converted too. Without optimizer state, the
                masters of weights begin with the weights.

        Raises:
            ValueError: a tensor is missing.
        """
        with_state = any(name.startswith(f"{OPTIMIZER}/") for name in tensors)
        out: dict[Variable, Callable[[], np.ndarray]] = {}
        rows = self._rows(variables)
        places = self._places(variables, with_state, fp8=False)
        places += [] if with_state else _master_places(rows)
        places += [p for p in self._fp8_places(rows) if p.prefix + p.row.weights[0].name in tensors]
        for place in places:
            for weight in place.row.weights:
                _check_presence(place.prefix + weight.name, tensors)
            if isinstance(place.variable, NamedTensors):
                parts = _QuantisedParts(partial(self._host_data, place, tensors), place.variable)
                out.update({v: partial(parts.of, v) for v in parts.variables})
            else:
                out[place.variable] = self._source(place, tensors)
        return out

    def _source(self, place: _Place, tensors: Arrays) -> Callable[[], np.ndarray]:
        """What makes the data of a variable; of what some elements can be had, a part of it."""
        whole = partial(self._typed_data, place, tensors)
        if not isinstance(tensors, PartialReader):
            return whole
        row, variable, prefix, common = place

        def some(held: tuple[VariablePart, ...]) -> np.ndarray:
            cuts = zip(row.weights, _cut(_Form.of(row, variable, common), held), strict=True)
            wanted = {prefix + w.name: partial(tensors.some, prefix + w.name, cut.layout)
                      for w, cut in cuts}  # fmt: skip
            return self._typed_data(place, Computed(wanted))

        return OnDemand(whole, some)

    def _typed_data(self, place: _Place, tensors: Arrays) -> np.ndarray:
        data = self._host_data(place, tensors)
        return data.astype(place.variable.dtype.as_numpy(), copy=False)

    def _host_data(self, place: _Place, tensors: Arrays) -> np.ndarray:
        row, variable, prefix, common = place
        if common:
            return _fitted(np.asarray(tensors[prefix + row.weights[0].name]), variable.shape)
        return row.to_host(tensors, self.tensor_parallel, prefix)

    def variables(self, variables: Variables, optimizer: bool = True) -> list[Variable]:
        """The variables that `to_logical` reads, in its order."""
        return [place.variable for place in self._places(variables, optimizer)]

    def to_logical(
        self,
        read: Callable[[Variable], np.ndarray],
        variables: Variables,
        optimizer: bool = True,
        held: HeldParts | None = None,
    ) -> Arrays:
        """The inverse of `to_variables`: logical tensors, made when they are asked for.

        Taken in order, they read each variable once, and those of one remote buffer one after the
        other.

        Args:
            read: gives the host data of a variable.
            held: access to their parts, where tensors are asked for in parts (`ShardSource`).
        """
        places = self._places(variables, optimizer)
        return _Logical(places, read, self.tensor_parallel, held)

    def gradients(self, read: Callable[[Variable], np.ndarray], variables: Variables) -> Arrays:
        """Gradients by the weight's name, from the variables in the `grad` trees."""
        trained = [(row, tree) for row, tree in self._rows(variables) if row.trained]
        places = [_Place(row, tree.grad.get(row.path), "") for row, tree in trained]
        return _Logical(places, read, self.tensor_parallel, None)

    def _rows(self, variables: Variables) -> list[tuple[Row, NamedTensors]]:
        """Each row, and the trees of its layer. Rows of a phase's layers that share a remote buffer
        follow each other."""
        found: list[tuple[Row, NamedTensors]] = []
        for name, trees in variables.items():
            if isinstance(trees, NamedTensors):
                layers = [(name, trees)] if name in self.layers else []
            else:  # a phase that owns nothing has no layers here
                layers = list(zip(self.phases.get(name, ()), trees, strict=True))
            rows = [(row, tree) for layer, tree in layers for row in self.layers[layer]]
            found += sorted(rows, key=lambda pair: pair[0].path)
        return found

    def _places(self, variables: Variables, optimizer: bool, fp8: bool = True) -> list[_Place]:
        """Weights, then optimizer state and FP8 state; entries of a remote buffer follow each
        other."""
        rows = self._rows(variables)
        places = [_Place(row, tree.fwd.get(row.path), "") for row, tree in rows]
        if optimizer:
            state = [
                _state_place(row, slot, variable)
                for row, tree in rows
                for slot, variable in _optimizer_state(row, tree).items()
            ]
            places += sorted(state, key=lambda place: place.prefix)
        return places + (self._fp8_places(rows) if optimizer and fp8 else [])

    @staticmethod
    def _fp8_places(rows: Sequence[tuple[Row, NamedTensors]]) -> list[_Place]:
        """The state of the FP8 products of linear layers, under the names of their weights."""
        found = []
        for row, tree in rows:
            layer, _, name = row.path.rpartition(".")
            if name == "weight" and f"{layer}.product" in tree.fwd:
                state = tree.fwd.get(f"{layer}.product").to_dict().items()
                found += [_Place(row, v, f"{FP8}/{slot}/", common=True) for slot, v in state]
        return sorted(found, key=lambda place: place.prefix)


def _optimizer_state(row: Row, tree: NamedTensors) -> Mapping[str, Variable]:
    """What an optimizer keeps for a row, as far as the program has it."""
    there = row.trained and "optim" in tree
    return tree.optim.get(row.path).to_dict() if there else {}


def _state_place(row: Row, name: str, variable: Variable) -> _Place:
    """Optimizer state, under the name that it has for a weight as Hugging Face turns it."""
    slot = SLOTS[name]
    own = row if slot.over in ("elements", "weight") else row.means(slot.over == "columns")
    theirs = slot.turned if row.transpose else slot
    return _Place(own, variable, f"{OPTIMIZER}/{theirs.name}/", slot.over == "weight")


def _master_places(rows: Sequence[tuple[Row, NamedTensors]]) -> list[_Place]:
    """The masters of weights, with the names of the weights."""
    found = []
    for row, tree in rows:
        state = _optimizer_state(row, tree)
        found += [_Place(row, state[MASTER.name], "")] if MASTER.name in state else []
    return found


def _fitted(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Amax histories, latest first, cut or zero-padded to another length; other data unchanged."""
    if data.ndim < 2 or data.shape == shape:
        return data
    missing = max(shape[1] - data.shape[1], 0)
    return np.pad(data[:, : shape[1]], ((0, 0), (0, missing)))


def _part_of(tensors: Arrays, name: str, rows: slice | None) -> np.ndarray:
    return tensors[name] if rows is None else tensors[name][rows]


def _same(read: Callable[[], np.ndarray], name: str, tensors: Arrays, copy: str) -> np.ndarray:
    """What `read` gives of `name`, if `copy` has the same."""
    found = read()
    if not np.array_equal(found, tensors[copy]):
        raise WeightsError(
            f"{name!r} and {copy!r} differ, but the configured model has one weight for both"
        )
    return found


def _joined(weights: Arrays, names: Sequence[str]) -> np.ndarray:
    return np.concatenate([weights[name] for name in names])


def _some(names: Iterable[str]) -> str:
    first, *rest = sorted(names) or ["none"]
    first = shown_name(first, 48)  # two of them, and a path, are in one sentence
    return f"{first} and {len(rest)} more" if rest else first


def without_optimizer(tensors: Arrays) -> Arrays:
    """All but the optimizer's state, on demand."""
    if isinstance(tensors, _Logical):
        return tensors.without(f"{OPTIMIZER}/")
    names = [name for name in tensors if not name.startswith(f"{OPTIMIZER}/")]
    return Computed({name: partial(tensors.__getitem__, name) for name in names})


def nbytes_of(tensors: Arrays) -> int:
    """Bytes of tensors, without reading those of a program."""
    if isinstance(tensors, _Logical):
        return tensors.nbytes
    return sum(array.nbytes for array in tensors.values())
