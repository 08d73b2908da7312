"""One table of weights, read in both directions.

A model's weights have names and shapes of their own, independent of how a program lays them out:
the *logical* weights, with Hugging Face's names. A row of the table says of which logical weights
a variable of ours is made. The same rows convert weights, and everything of the same shape such as
the optimizer's moments, to variables and back, and hold the rules for initial values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from modelling.quantisation import quantised
from popxl import Variable
from popxl_addons import NamedTensors
from popxl_addons.array_munging import pad_axis, shard

Arrays = Mapping[str, np.ndarray]
Variables = Mapping[str, NamedTensors | Sequence[NamedTensors]]
"""A program's variables: by layer, or by phase for each of its layers, the trees `fwd` (variables),
`optim` (their optimizer state, by variable) and `grad` (their gradients), as far as there are."""

OPTIMIZER = "optimizer"
"""First part of the names of optimizer state: `optimizer/first_order/<weight>`."""


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
        weights: joined along `axis`, on each replica its parts of them. More than one need `axis`.
        transpose: whether the variable is (in, out), while the logical weights are (out, in).
        axis: of the variable, cut over tensor parallelism; the last part is padded with zeros if
            it is shorter. None: the whole is on every replica.
    """

    path: str
    weights: tuple[Weight, ...]
    transpose: bool = False
    axis: int | None = None

    @classmethod
    def linear(cls, path: str, *weights: Weight, cut: Literal["in", "out"]) -> Row:
        """The weight of the linear map in `path`: the "in" or the "out" features are cut."""
        return cls(f"{path}.weight", weights, transpose=True, axis=0 if cut == "in" else 1)

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
        cut = [_shards(array, self.axis, tensor_parallel) for array in arrays]
        data = np.concatenate(cut, 1 + self.axis)
        return data if tensor_parallel > 1 else data[0]

    def to_logical(
        self, data: np.ndarray, tensor_parallel: int, prefix: str = ""
    ) -> dict[str, np.ndarray]:
        """The inverse of `to_host`. Padding is dropped."""
        if self.axis is None:
            return {prefix + self.weights[0].name: self._turned(data)}
        shards = data if tensor_parallel > 1 else data[None]
        parts = np.split(shards, len(self.weights), 1 + self.axis)
        out = {}
        for weight, part in zip(self.weights, parts, strict=True):
            whole = np.concatenate(list(part), self.axis)
            shape = weight.shape[::-1] if self.transpose else weight.shape
            out[prefix + weight.name] = self._turned(whole[tuple(map(slice, shape))])
        return out

    def _turned(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array.T if self.transpose else array)


def _checked(weight: Weight, logical: Arrays, prefix: str) -> np.ndarray:
    name = prefix + weight.name
    if name not in logical:
        raise ValueError(
            f"{name!r} is missing: the weights belong to a model of another kind or size than the "
            "configuration's"
        )
    array = np.asarray(logical[name])
    _check_shape(weight, name, array.shape)
    return array


def _check_shape(weight: Weight, name: str, shape: tuple[int, ...]) -> None:
    if shape != weight.shape:
        raise ValueError(f"{name!r} has shape {shape}, but the configuration needs {weight.shape}")


def _shards(array: np.ndarray, axis: int, count: int) -> np.ndarray:
    """(count, ...): equal parts along `axis`, the last padded with zeros."""
    length = -(-array.shape[axis] // count) * count
    return shard(pad_axis(array, length, axis), count, axis)


class _Computed(Mapping[str, np.ndarray]):
    """Arrays that are made when they are asked for, so that not all have to be in memory."""

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
    """

    layers: Mapping[str, tuple[Row, ...]]
    phases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tensor_parallel: int = 1
    aliases: Mapping[str, str] = field(default_factory=dict)
    ignored: Collection[str] = ()

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Every logical weight once."""
        return tuple(w for rows in self.layers.values() for row in rows for w in row.weights)

    # ---- logical weights ------------------------------------------------------------------------
    def initial(self, seed: int) -> Arrays:
        """Initial weights by name, float32, made when asked for. No layout changes them."""
        return _Computed({w.name: partial(w.initial, seed) for w in self.weights})

    def renamed(self, tensors: Arrays) -> Arrays:
        """The weights of a file under their logical names; each is read when asked for.

        Raises:
            ValueError: a weight is missing, or there is an unknown one.
        """
        sources = self._sources(tensors)
        return _Computed({own: partial(tensors.__getitem__, name) for own, name in sources.items()})

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that a file has the weights of this model, from their shapes by the file's names.

        Raises:
            ValueError: as for `renamed`, or a weight has another shape.
        """
        sources = self._sources(shapes)
        for weight in self.weights:
            _check_shape(weight, sources[weight.name], shapes[sources[weight.name]])

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
            raise ValueError(
                "the weights belong to a model of another kind or size than the configuration's: "
                f"missing {_some(missing)}, unknown {_some(unknown)}"
            )
        return found

    # ---- variables ------------------------------------------------------------------------------
    def to_variables(self, tensors: Arrays, variables: Variables) -> dict[Variable, np.ndarray]:
        """Host data of a program's variables from logical tensors.

        Args:
            tensors: weights by name; if there is optimizer state among them (see `OPTIMIZER`), and
                in the program, it is converted too.

        Raises:
            ValueError: a tensor is missing or has the wrong shape.
        """
        with_state = any(name.startswith(f"{OPTIMIZER}/") for name in tensors)
        out = {}
        for row, variable, prefix in self._places(variables, with_state):
            if isinstance(variable, NamedTensors):  # the parts of a weight in 4 bits
                whole = row.to_host(tensors, self.tensor_parallel, prefix)
                out.update(quantised(whole, variable))
                continue
            if variable.shape == ():  # such as a step counter: one for all the row's weights
                data = np.asarray(tensors[prefix + row.weights[0].name])
            else:
                data = row.to_host(tensors, self.tensor_parallel, prefix)
            out[variable] = data.astype(variable.dtype.as_numpy(), copy=False)
        return out

    def variables(self, variables: Variables, optimizer: bool = True) -> list[Variable]:
        """The variables that `to_logical` needs the data of."""
        return [variable for _, variable, _ in self._places(variables, optimizer)]

    def to_logical(
        self, data: Mapping[Variable, np.ndarray], variables: Variables, optimizer: bool = True
    ) -> dict[str, np.ndarray]:
        """The inverse of `to_variables`."""
        out: dict[str, np.ndarray] = {}
        for row, variable, prefix in self._places(variables, optimizer):
            out.update(self._logical(row, data[variable], prefix))
        return out

    def gradients(
        self, data: Mapping[Variable, np.ndarray], variables: Variables
    ) -> dict[str, np.ndarray]:
        """Gradients by the weight's name, from the variables in the `grad` trees."""
        out: dict[str, np.ndarray] = {}
        for row, tree in self._rows(variables):
            out.update(self._logical(row, data[tree.grad.get(row.path)], ""))
        return out

    def _logical(self, row: Row, data: np.ndarray, prefix: str) -> dict[str, np.ndarray]:
        if data.ndim == 0:
            return {prefix + w.name: np.asarray(data) for w in row.weights}
        return row.to_logical(data, self.tensor_parallel, prefix)

    def _rows(self, variables: Variables) -> Iterator[tuple[Row, NamedTensors]]:
        """Each row, and the trees of its layer."""
        trees: dict[str, NamedTensors] = {}
        for name, found in variables.items():
            if isinstance(found, NamedTensors):
                trees[name] = found
            else:  # a phase that owns nothing has no layers here
                trees.update(zip(self.phases.get(name, ()), found, strict=True))
        for layer, rows in self.layers.items():
            yield from ((row, trees[layer]) for row in rows)

    def _places(self, variables: Variables, optimizer: bool) -> Iterator[tuple[Row, Variable, str]]:
        """(row, variable, prefix of the logical names) of weights and optimizer state."""
        for row, tree in self._rows(variables):
            yield row, tree.fwd.get(row.path), ""
            if optimizer and "optim" in tree:
                for slot, variable in tree.optim.get(row.path).to_dict().items():
                    yield row, variable, f"{OPTIMIZER}/{slot}/"


def _some(names: Iterable[str]) -> str:
    first, *rest = sorted(names) or ["none"]
    return f"{first} and {len(rest)} more" if rest else first
