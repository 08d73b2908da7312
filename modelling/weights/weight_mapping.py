"""Weight mappings: how logical weights make up one variable of a program.

A logical weight has Hugging Face's name and shape, whatever the layout of the program.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from checkpoints.lazy_arrays import Arrays
from config.errors import UserError

EMBEDDING = "tokens.weight"
"""Path of the embedding's variable."""

HEAD = "lm_head.weight"
"""Path of the variable of a head that is not tied to the embedding."""

CLASSIFIER = "classifier."
"""Beginning of the paths of a classification head's variables."""


TEACHER = "teacher."
"""Beginning of the paths of a teacher's variables in its student's head."""


class WeightsError(UserError, ValueError):
    """Error: weights or state do not fit the configured model or program."""


@dataclass(frozen=True)
class Weight:
    """A logical weight: one parameter of the Hugging Face model, whatever its storage here.

    Attributes:
        name: Hugging Face's name.
        shape: Hugging Face's shape.
        std: standard deviation of the initial values, whose mean is 0 (0: all are 0); None: the
            initial values are 1.
        uniform: True if the initial values are uniform, not normal.
    """

    name: str
    shape: tuple[int, ...]
    std: float | None = None
    uniform: bool = False

    def init_values(self, seed: int) -> np.ndarray:
        """Initial values, float32, which depend on seed and weight name only."""
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
    """A LoRA adapter of the weights of a mapping that form one linear layer in files.

    Attributes:
        module: PEFT's name of the linear layer.
        weights: names of the weights that make up the linear layer.
        path: path of the adapter's variables.
        rank: number of rows of A.
        scale: factor on B A.
        dora: True if the adapter has DoRA magnitudes.
        owner: path of the adapter that owns A, where several mappings are one linear layer in
            files; else `path`.
        embeds: True if the layer is an embedding, whose inputs are token ids.
        tied: PEFT's names of modules that are tied to this one and share its adapter.
        parameter: PEFT's name of the parameter that stacks the layers of all experts, where
            `module` is one of them; else "".
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
        """Key of equal adapters: layers with equal keys can share one graph."""
        return self.path, self.rank, self.scale, len(self.weights), self.owner


@dataclass(frozen=True)
class WeightMapping:
    """Mapping of logical weights to one variable of a layer: joined, transposed and sharded.

    Attributes:
        path: path of the variable in its layer's tree.
        weights: logical weights, concatenated along `axis`; each replica concatenates its own
            shards. Several weights need an `axis`.
        transpose: True if the variable is (in, out) while the logical weights are (out, in).
        axis: axis of the variable that is sharded over tensor parallelism, with the last shard
            zero-padded to the length of the others; None: one weight, full on every replica.
        is_sharded: False if weights concatenated along `axis` are full on every replica.
        shard_replicas: number of consecutive tensor-parallel replicas that hold the same shard.
        trainable: False if the variable is frozen: it is loaded but never written back, and has no
            gradient and no optimizer state.
        is_buffer: True for a buffer of Hugging Face's model. Files may lack it, and then it has
            its initial value. No step changes it, but it is saved with trainable weights.
        is_adapter: True for a variable of an adapter, which is float32 in every precision.
        adapters: adapters of the weights, in their order.
        expert_matrices: number of matrices of a layer's experts; 0 if the weights are no experts'.
        expert_parallel: True if a shard is an equal share of the weights, instead of a shard of
            each weight.
    """

    path: str
    weights: tuple[Weight, ...]
    transpose: bool = False
    axis: int | None = None
    is_sharded: bool = True
    shard_replicas: int = 1
    trainable: bool = True
    is_buffer: bool = False
    is_adapter: bool = False
    adapters: tuple[LoraSpec, ...] = ()
    expert_matrices: int = 0
    expert_parallel: bool = False

    def num_shards(self, tensor_parallel: int) -> int:
        """Number of distinct shards of the variable over `tensor_parallel` replicas."""
        return tensor_parallel // self.shard_replicas if self.is_sharded else 1

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of one full weight in the variable's order of axes."""
        shape = self.weights[0].shape
        return shape[::-1] if self.transpose else shape

    def shape_on_replica(self, tensor_parallel: int) -> tuple[int, ...]:
        """Shape of the variable's shard on one replica."""
        shape = list(self.weight_shape)
        if self.axis is None:
            return tuple(shape)
        shards, size = self.num_shards(tensor_parallel), shape[self.axis]
        count = len(self.weights)
        padded = -(-size // shards) * count
        shape[self.axis] = size * count // shards if self.expert_parallel else padded
        return tuple(shape)

    def to_variable_data(
        self, logical_weights: Arrays, tensor_parallel: int, prefix: str = ""
    ) -> np.ndarray:
        """Convert logical weights to the variable's data on the host, in the weights' dtype.

        Args:
            logical_weights: arrays by name: `prefix` and the name of a weight.

        Returns:
            Array of the variable's shape on a replica; with several shards they are stacked along
            a new first axis.

        Raises:
            ValueError: an array is missing or has the wrong shape.
        """
        arrays = [
            self._transpose_if_needed(_read_weight(w, logical_weights, prefix))
            for w in self.weights
        ]
        if self.axis is None:
            (array,) = arrays
            return array
        tensor_parallel = self.num_shards(tensor_parallel)
        if self.expert_parallel:
            arrays = [np.concatenate(arrays, self.axis)]
        shards = [_split_shards(array, self.axis, tensor_parallel) for array in arrays]
        data = shards[0] if len(shards) == 1 else np.concatenate(shards, 1 + self.axis)
        return data if tensor_parallel > 1 else data[0]

    def to_logical_weights(
        self, data: np.ndarray, tensor_parallel: int, prefix: str = ""
    ) -> dict[str, np.ndarray]:
        """Convert host data to unpadded logical weights; the inverse of `to_variable_data`."""
        if self.axis is None:
            return {prefix + self.weights[0].name: self._transpose_if_needed(data)}
        tensor_parallel = self.num_shards(tensor_parallel)
        shards = data if tensor_parallel > 1 else data[None]
        if self.expert_parallel:
            shards = np.concatenate(list(shards), self.axis)[None]
        shards_of_weights = np.split(shards, len(self.weights), 1 + self.axis)
        logical = {}
        for weight, weight_shards in zip(self.weights, shards_of_weights, strict=True):
            padded = np.concatenate(list(weight_shards), self.axis)
            shape = weight.shape[::-1] if self.transpose else weight.shape
            logical[prefix + weight.name] = self._transpose_if_needed(
                padded[tuple(map(slice, shape))]
            )
        return logical

    def axis_moment_mapping(self, axis: int) -> WeightMapping:
        """Mapping of Adafactor's moments, with an element per row or column of each matrix."""
        weight_axis = 1 - axis if self.transpose else axis
        weights = tuple(replace(w, shape=(w.shape[weight_axis],)) for w in self.weights)
        return WeightMapping(
            self.path,
            weights,
            axis=0,
            is_sharded=self.is_sharded and axis == self.axis,
            shard_replicas=self.shard_replicas,
        )

    def block_scale_mapping(self, axis: int) -> WeightMapping:
        """Mapping of quantization scales of blocks along `axis` of the variable."""
        from popxl_addons.optimizers.state_8bit import scales_shape

        weight_axis = 1 - axis if self.transpose else axis
        weights = tuple(replace(w, shape=scales_shape(w.shape, weight_axis)) for w in self.weights)
        return replace(self, weights=weights)

    def expert_group_mapping(self, group_index: int, num_groups: int) -> WeightMapping:
        """Mapping of the experts in group number `group_index` of `num_groups` equal groups."""
        size = len(self.weights) // num_groups
        weights = self.weights[group_index * size : (group_index + 1) * size]
        return replace(self, weights=weights, expert_matrices=self.expert_matrices // num_groups)

    @property
    def is_updated(self) -> bool:
        """True if optimizer steps change the variable's values."""
        return self.trainable and not self.is_buffer

    @property
    def unsharded_axis(self) -> int:
        """Matrix axis along which weights are neither sharded nor concatenated."""
        from popxl_addons.optimizers.adafactor import MatrixLayout

        return MatrixLayout(len(self.weights), self.axis).unsharded_axis

    @property
    def input_axis(self) -> int:
        """Matrix axis of the input features."""
        return 0 if self.transpose else 1

    def _transpose_if_needed(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array.T if self.transpose else array)


def is_linear(mapping: WeightMapping) -> bool:
    """True for the weight of a linear layer inside a block; false for a head."""
    return (
        mapping.transpose
        and mapping.path != HEAD
        and not mapping.path.startswith((CLASSIFIER, TEACHER))
        and not mapping.is_adapter
        and not mapping.expert_matrices
    )


def can_have_adapter(mapping: WeightMapping) -> bool:
    """True for a weight that can have an adapter: linear layers, embedding and head."""
    return is_linear(mapping) or is_vocabulary(mapping)


def is_vocabulary(mapping: WeightMapping) -> bool:
    """True for the embedding, and for a head that is not tied to it."""
    return mapping.path in (EMBEDDING, HEAD)


def is_quantizable(mapping: WeightMapping) -> bool:
    """True for a weight that can be quantized: linear layers inside a block, and experts."""
    return is_linear(mapping) or mapping.expert_matrices > 0


def is_trainable(mapping: WeightMapping) -> bool:
    """True for a mapping whose weights training changes."""
    return mapping.trainable


def is_adapter(mapping: WeightMapping) -> bool:
    """True for a mapping of adapter weights (LoRA or DoRA)."""
    return mapping.is_adapter


def _read_weight(weight: Weight, logical_weights: Arrays, prefix: str) -> np.ndarray:
    """Read a logical weight; raise WeightsError if its shape is wrong."""
    name = prefix + weight.name
    check_tensor_present(name, logical_weights)
    array = np.asarray(logical_weights[name])
    check_tensor_shape(name, array.shape, weight.shape)
    return array


def check_tensor_present(name: str, tensors: Arrays) -> None:
    """Raise WeightsError if the named tensor is missing."""
    if name not in tensors:
        raise WeightsError(
            f"{name!r} is missing: the weights belong to a model of another kind or size than the "
            "configuration's"
        )


def check_tensor_shape(name: str, shape: tuple[int, ...], expected_shape: tuple[int, ...]) -> None:
    """Raise WeightsError if the named tensor does not have the shape `expected_shape`."""
    if shape != expected_shape:
        raise WeightsError(
            f"{name!r} has shape {shape}, but the configuration needs {expected_shape}"
        )


def _split_shards(array: np.ndarray, axis: int, count: int) -> np.ndarray:
    """Split an array into `count` equal shards along `axis`, zero-padded: (count, ...)."""
    if count == 1:
        return array[None]
    from popxl_addons.array_munging import pad_axis, shard

    length = -(-array.shape[axis] // count) * count
    return shard(pad_axis(array, length, axis), count, axis)


def module_name(weight_name: str) -> str:
    """Name of the module that has the named weight or bias: all but the last name component."""
    return weight_name.rpartition(".")[0]
