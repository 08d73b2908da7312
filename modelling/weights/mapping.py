"""Logical weights, and how a variable is made of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from checkpoints.arrays import Arrays
from config.errors import UserError
from popxl_addons.array_munging import pad_axis, shard
from popxl_addons.optimizers.adafactor import MatrixLayout
from popxl_addons.optimizers.state_8bit import scales_shape

EMBEDDING = "tokens.weight"
"""The path of the embedding."""

HEAD = "lm_head.weight"
"""The path of a head that is not the embedding."""


class WeightsError(UserError, ValueError):
    """Weights or state that belong to another model or program than the configured one."""


@dataclass(frozen=True)
class Weight:
    """A logical weight.

    Attributes:
        name: Hugging Face's.
        shape: Hugging Face's.
        std: standard deviation of its initial values around 0 (0: they are 0); None: they are 1.
        uniform: whether they are uniform, not normal.
    """

    name: str
    shape: tuple[int, ...]
    std: float | None = None
    uniform: bool = False

    def init_values(self, seed: int) -> np.ndarray:
        """Initial values, float32: a function of the seed and the name alone."""
        if self.std is None:
            return np.ones(self.shape, np.float32)
        if self.std == 0:
            return np.zeros(self.shape, np.float32)
        digest = hashlib.sha256(self.name.encode()).digest()
        generator = np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])
        if self.uniform:
            values = 2 * generator.random(self.shape, np.float32) - 1
            return values * np.float32(self.std * 3**0.5)
        values = generator.standard_normal(self.shape, np.float32)
        values *= np.float32(self.std)
        return values


@dataclass(frozen=True)
class LoraSpec:
    """An adapter of neighbouring weights in a row, the linear map's as files have it.

    Attributes:
        module: PEFT's name of that map.
        weights: names of the row's weights that it is made of.
        path: of the adapter's variables.
        rank: rows of A.
        scale: factor on what it adds.
        dora: whether the rows of the result have norms of their own, see `modelling.layers`.
        owner: path of the adapter that has A, where several rows are one map in files; else `path`.
        embeds: whether the map is an embedding, whose inputs are tokens.
        tied: PEFT's names of other maps that are this one: they have the same adapter.
        parameter: PEFT's name of all experts' maps, of which `module` is one's; "": it is no
            expert's.
    """

    module: str
    weights: tuple[str, ...]
    path: str
    rank: int
    scale: float
    dora: bool
    owner: str
    embeds: bool = False
    tied: tuple[str, ...] = ()
    parameter: str = ""

    @property
    def graph_key(self) -> tuple[str, int, float, int, str]:
        """What layers have in common whose adapters a graph can be shared by."""
        return self.path, self.rank, self.scale, len(self.weights), self.owner


@dataclass(frozen=True)
class WeightMapping:
    """How a variable is made of logical weights.

    Attributes:
        path: of the variable in its layer's tree of variables.
        weights: joined along `axis`; each replica joins its own parts. Several weights need `axis`.
        transpose: whether the variable is (in, out), while the logical weights are (out, in).
        axis: of the variable, cut over tensor parallelism; the last part is padded with zeros if
            it is shorter. None: the whole is on every replica.
        cut: whether it is; if not, weights joined along `axis` are whole on every replica.
        shard_replicas: neighbours of a tensor-parallel group that have the same part.
        trained: whether training changes it. If not, it is frozen: it is loaded, and never written
            back, and has no gradient and no optimizer state.
        is_buffer: whether it is a buffer of Hugging Face's model, which files may lack: it is then
            what it is initially. No step changes it, but where others are trained it is saved.
        is_adapter: whether it is an adapter's, float32 whatever the model's precision.
        adapters: of its weights, in their order.
        experts: how many matrices it is, which a layer's experts have; 0: it is no such row.
        shared_out: whether a part of it is some of the weights, as many as any other, not a part of
            each.
    """

    path: str
    weights: tuple[Weight, ...]
    transpose: bool = False
    axis: int | None = None
    cut: bool = True
    shard_replicas: int = 1
    trainable: bool = True
    is_buffer: bool = False
    is_adapter: bool = False
    adapters: tuple[LoraSpec, ...] = ()
    expert_matrices: int = 0
    expert_parallel: bool = False

    @classmethod
    def linear(
        cls, path: str, *weights: Weight, cut: Literal["in", "out"], shard_replicas: int = 1
    ) -> WeightMapping:
        """The weight of the linear map in `path`: the "in" or the "out" features are cut."""
        axis = 0 if cut == "in" else 1
        return cls(f"{path}.weight", weights, True, axis, shard_replicas=shard_replicas)

    def num_shards(self, tensor_parallel: int) -> int:
        """Into how many parts the weights are cut."""
        return tensor_parallel // self.shard_replicas if self.cut else 1

    def shape_on_replica(self, tensor_parallel: int) -> tuple[int, ...]:
        """The variable's shape on a replica."""
        first = self.weights[0].shape
        shape = list(first[::-1] if self.transpose else first)
        if self.axis is None:
            return tuple(shape)
        parts, size = self.num_shards(tensor_parallel), shape[self.axis]
        count = len(self.weights)
        shape[self.axis] = (
            size * count // parts if self.expert_parallel else -(-size // parts) * count
        )
        return tuple(shape)

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
        arrays = [self._transposed(_checked(w, logical, prefix)) for w in self.weights]
        if self.axis is None:
            (array,) = arrays
            return array
        tensor_parallel = self.num_shards(tensor_parallel)
        if self.expert_parallel:
            arrays = [np.concatenate(arrays, self.axis)]
        cut = [_shards(array, self.axis, tensor_parallel) for array in arrays]
        data = cut[0] if len(cut) == 1 else np.concatenate(cut, 1 + self.axis)
        return data if tensor_parallel > 1 else data[0]

    def to_logical(
        self, data: np.ndarray, tensor_parallel: int, prefix: str = ""
    ) -> dict[str, np.ndarray]:
        """The inverse of `to_host`. Padding is dropped."""
        if self.axis is None:
            return {prefix + self.weights[0].name: self._transposed(data)}
        tensor_parallel = self.num_shards(tensor_parallel)
        shards = data if tensor_parallel > 1 else data[None]
        if self.expert_parallel:
            shards = np.concatenate(list(shards), self.axis)[None]
        parts = np.split(shards, len(self.weights), 1 + self.axis)
        out = {}
        for weight, part in zip(self.weights, parts, strict=True):
            whole = np.concatenate(list(part), self.axis)
            shape = weight.shape[::-1] if self.transpose else weight.shape
            out[prefix + weight.name] = self._transposed(whole[tuple(map(slice, shape))])
        return out

    def axis_moments(self, axis: int) -> WeightMapping:
        """The row of a vector along `axis` of this row's variable, a matrix for each weight."""
        size = 1 - axis if self.transpose else axis
        weights = tuple(replace(w, shape=(w.shape[size],)) for w in self.weights)
        cut = self.cut and axis == self.axis
        replicas = self.shard_replicas
        return WeightMapping(self.path, weights, axis=0, cut=cut, shard_replicas=replicas)

    def block_scales(self, axis: int) -> WeightMapping:
        """The row of the scales of groups along an axis of this row's variable."""
        size = 1 - axis if self.transpose else axis
        weights = tuple(replace(w, shape=scales_shape(w.shape, size)) for w in self.weights)
        return replace(self, weights=weights)

    def expert_slice(self, group: int, groups: int) -> WeightMapping:
        """The row of one of so many groups of the experts whose matrices it has."""
        size = len(self.weights) // groups
        own = self.weights[group * size : (group + 1) * size]
        return replace(self, weights=own, expert_matrices=self.expert_matrices // groups)

    @property
    def is_updated(self) -> bool:
        """True if steps change it."""
        return self.trainable and not self.is_buffer

    @property
    def unsharded_axis(self) -> int:
        """An axis of this row's matrix that is not cut, nor are weights joined along it."""
        return MatrixLayout(len(self.weights), self.axis).unsharded_axis

    @property
    def input_axis(self) -> int:
        """The axis of this row's matrices that has the input features."""
        return 0 if self.transpose else 1

    def _transposed(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array.T if self.transpose else array)


def is_linear(mapping: WeightMapping) -> bool:
    """Whether a row is a linear map inside a layer, which the head is not."""
    return (
        mapping.transpose
        and mapping.path != HEAD
        and not mapping.is_adapter
        and not mapping.expert_matrices
    )


def can_have_adapter(mapping: WeightMapping) -> bool:
    """Decide whether a row can have an adapter: a linear map inside a layer, or at an end."""
    return is_linear(mapping) or is_vocabulary(mapping)


def is_vocabulary(mapping: WeightMapping) -> bool:
    """Decide whether a row is the embedding or a head of its own."""
    return mapping.path in (EMBEDDING, HEAD)


def is_quantizable_row(mapping: WeightMapping) -> bool:
    """Whether a row may be held in few bits: a linear map inside a layer, or its experts'."""
    return is_linear(mapping) or mapping.expert_matrices > 0


def is_trainable(mapping: WeightMapping) -> bool:
    """Whether training changes a row."""
    return mapping.trainable


def is_adapter_row(mapping: WeightMapping) -> bool:
    """Whether a row is an adapter's."""
    return mapping.is_adapter


def _checked(weight: Weight, logical: Arrays, prefix: str) -> np.ndarray:
    name = prefix + weight.name
    check_presence(name, logical)
    array = np.asarray(logical[name])
    check_shape(name, array.shape, weight.shape)
    return array


def check_presence(name: str, logical: Arrays) -> None:
    if name not in logical:
        raise WeightsError(
            f"{name!r} is missing: the weights belong to a model of another kind or size than the "
            "configuration's"
        )


def check_shape(name: str, shape: tuple[int, ...], needed: tuple[int, ...]) -> None:
    if shape != needed:
        raise WeightsError(f"{name!r} has shape {shape}, but the configuration needs {needed}")


def _shards(array: np.ndarray, axis: int, count: int) -> np.ndarray:
    """(count, ...): equal parts along `axis`, the last padded with zeros."""
    if count == 1:
        return array[None]
    length = -(-array.shape[axis] // count) * count
    return shard(pad_axis(array, length, axis), count, axis)
