"""The weight map of a model: the logical weights that make up each variable.

Logical weights have Hugging Face's names and shapes, whatever the layout of the program. The
mappings convert weights, and tensors of the same shapes such as optimizer moments, to variables and
back, and define the initial values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from checkpoints.lazy_arrays import Arrays, LazyArrays
from config.optimizer_state import MASTER_WEIGHT, RESIDUAL, STATE_SLOTS
from modelling.weights.hf_tensor_names import HfTensorNames
from modelling.weights.variables import (
    OPTIMIZER_PREFIX,
    HfNamedTensors,
    ShardReader,
    VariableSource,
)
from modelling.weights.weight_mapping import (
    EMBEDDING,
    HEAD,
    Weight,
    WeightMapping,
    WeightsError,
    check_tensor_present,
)
from popxl import Variable
from popxl.session import LazyValue, VariableShard
from popxl_addons import NamedTensors

Variables = Mapping[str, NamedTensors | Sequence[NamedTensors]]
"""Variables of a program by layer, or by phase for each of its layers: trees `fwd` (weights),
`optim` (optimizer state, by weight) and `grad` (gradients), where they exist."""

EMBEDDINGS = "embeddings"
"""Name of the embedding's layer in every weight map."""

HEAD_LAYER = "head"
"""Name of the output layer in every weight map."""

FP8_PREFIX = "fp8"
"""Prefix of the names of FP8 state: `fp8/scale/<weight>`."""

EXPERT_GROUP = "/"
"""Separator between a layer and its group of experts in a name: `layer.0/1`."""


def without_expert_group(name: str) -> str:
    """Strip the expert group from a layer's name; a name without one is returned unchanged."""
    return name.partition(EXPERT_GROUP)[0]


@dataclass(frozen=True)
class TrainableTokens:
    """Trainable rows of a frozen embedding or head (PEFT's trainable tokens).

    Attributes:
        delta: name of the tensor that holds the rows.
        rows: indices of the rows, which are token ids.
    """

    delta: str
    rows: Sequence[int]


@dataclass(frozen=True)
class WeightMap:
    """Weight mappings of all variables of a model, by phase and layer.

    Attributes:
        layers: mappings of each layer in the order of the forward pass, and of each group of its
            experts if experts are streamed. A variable that several layers use belongs to the
            layer that owns it.
        phases: names of the layers of each phase of a phased program.
        tensor_parallel: number of tensor-parallel replicas.
        hf_names: names and forms that Hugging Face's files have instead of logical weights.
        phase_splits: phases that a family's phase was split into, where its layers have different
            trainable weights.
        trainable_tokens: trainable rows of frozen weights, by the weight's name.
    """

    layers: Mapping[str, tuple[WeightMapping, ...]]
    phases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tensor_parallel: int = 1
    hf_names: HfTensorNames = field(default_factory=HfTensorNames)
    phase_splits: Mapping[str, Sequence[str]] = field(default_factory=dict)
    trainable_tokens: Mapping[str, TrainableTokens] = field(default_factory=dict)

    @property
    def mappings(self) -> tuple[WeightMapping, ...]:
        """Weight mappings of all layers."""
        return tuple(mapping for mappings in self.layers.values() for mapping in mappings)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All logical weights, without duplicates."""
        return tuple(w for mapping in self.mappings for w in mapping.weights)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all logical weights by name."""
        return {w.name: w.shape for w in self.weights}

    @property
    def trainable_weights(self) -> tuple[Weight, ...]:
        """The logical weights that training changes."""
        return tuple(w for mapping in self.mappings if mapping.trainable for w in mapping.weights)

    @property
    def has_adapters(self) -> bool:
        """True if any weight has an adapter."""
        return any(mapping.adapters for mapping in self.mappings)

    @property
    def frozen_names(self) -> list[str]:
        """Names of the logical weights that training leaves unchanged."""
        trainable = {w.name for w in self.trainable_weights}
        return [w.name for w in self.weights if w.name not in trainable]

    @property
    def vocabulary_names(self) -> list[str]:
        """Names of embedding and head weights, which have one row per token."""
        paths = (EMBEDDING, HEAD, HEAD.replace("weight", "bias"))
        return [
            w.name for mapping in self.mappings if mapping.path in paths for w in mapping.weights
        ]

    @property
    def embedding_names(self) -> list[str]:
        """Names of the embedding in files, then those of the weights tied to it.

        Of two embeddings it is the decoder's, to which a head can be tied.
        """
        *_, mapping = (mapping for mapping in self.mappings if mapping.path == EMBEDDING)
        embedding, aliases = mapping.weights[0].name, self.hf_names.aliases.items()
        return [embedding, *(alias for alias, name in aliases if name == embedding)]

    def filter_mappings(self, predicate: Callable[[WeightMapping], bool]) -> WeightMap:
        """Returns a weight map of the mappings for which `predicate` is true."""
        layers = {name: tuple(filter(predicate, layer)) for name, layer in self.layers.items()}
        names = {
            w.name for mappings in layers.values() for mapping in mappings for w in mapping.weights
        }
        return replace(self, layers=layers, hf_names=self.hf_names.subset(names))

    @property
    def without_adapters(self) -> WeightMap:
        """The weight map without adapters."""
        return self.filter_mappings(lambda mapping: not mapping.is_adapter)

    # ---- logical weights ------------------------------------------------------------------------
    def init_weights(self, seed: int) -> Arrays:
        """Initial weights by name, float32, computed when read; equal in every parallel layout."""
        return LazyArrays({w.name: partial(w.init_values, seed) for w in self.weights})

    def from_hf(self, tensors: Arrays) -> Arrays:
        """Convert tensors of Hugging Face files to logical weights; see `HfTensorNames`."""
        return self.hf_names.from_hf(tensors, self.shapes)

    def to_hf(self, weights: Arrays) -> Arrays:
        """Convert logical weights to tensors of Hugging Face files; see `HfTensorNames`."""
        return self.hf_names.to_hf(weights)

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check names and shapes of a file's tensors against the model; see `HfTensorNames`."""
        self.hf_names.check_shapes(shapes, self.shapes)

    # ---- variables ------------------------------------------------------------------------------
    def check_complete(self, variables: Variables) -> None:
        """Check that each variable of a program has a mapping and each mapping a variable.

        A variable without a mapping would stay zero.

        Raises:
            WeightsError: one is missing, which is a fault of the family's modules.
        """
        for layer, tree in self._layer_trees(variables):
            mapped = {mapping.path for mapping in self.layers[layer]}
            paths = (_weight_mapping_path(name, mapped) for name in tree.fwd.keys_flat())
            in_program = {path for path in paths if path is not None}
            for name in sorted(mapped ^ in_program):
                missing = f"{layer}.{name}, of the weight map, is not in the program: {_DOCS_HINT}"
                raise WeightsError(
                    missing if name in mapped else format_missing_mapping(layer, name)
                )

    def to_variables(
        self, tensors: Arrays, variables: Variables
    ) -> dict[Variable, Callable[[], np.ndarray]]:
        """Returns functions that compute variables' host data from logical tensors.

        A function reads the tensors that it needs and raises WeightsError if one has the wrong
        shape. From tensors in a `LazyArrays` a process reads only the elements of its devices.

        Args:
            tensors: weights by name, with optimizer state (`OPTIMIZER_PREFIX`) and FP8 state, which
                are converted if the program has them. Without optimizer state, master weights and
                residuals are initialized from the weights.

        Raises:
            ValueError: a tensor is missing.
        """
        with_state = any(name.startswith(f"{OPTIMIZER_PREFIX}/") for name in tensors)
        readers: dict[Variable, Callable[[], np.ndarray]] = {}
        pairs = self._mapping_tree_pairs(variables)
        sources = self._variable_sources(variables, with_state, fp8=False)
        sources += [] if with_state else _master_weight_sources(pairs)
        sources += [s for s in self._fp8_sources(pairs) if s.tensor_names[0] in tensors]
        for source in sources:
            for name in source.tensor_names:
                check_tensor_present(name, tensors)
            if isinstance(source.variable, NamedTensors):
                from modelling.quantization import QuantizedWeight

                data = partial(self._quantized_data, source, tensors)
                fields = QuantizedWeight(data, source.variable)
                readers.update({v: partial(fields.pop_data, v) for v in fields.variables})
            else:
                readers[source.variable] = self._make_data_reader(source, tensors)
        return readers

    def _make_data_reader(
        self, source: VariableSource, tensors: Arrays
    ) -> Callable[[], np.ndarray]:
        """Returns the function that computes a variable's host data, by shards if possible."""
        full = partial(self._typed_data, source, tensors)
        if not isinstance(tensors, LazyArrays):
            return full

        def read_shards(shards: tuple[VariableShard, ...]) -> np.ndarray:
            shardings = zip(source.tensor_names, source.shardings(shards), strict=True)
            readers = {
                name: partial(tensors.read_shards, name, one.layout) for name, one in shardings
            }
            return self._typed_data(source, LazyArrays(readers))

        return LazyValue(full, read_shards)

    def _quantized_data(self, source: VariableSource, tensors: Arrays) -> Sequence[np.ndarray]:
        """Host data of a quantized variable's fields; cached if the tensors support it."""
        from modelling.quantization import QuantizedWeightCache, quantize_weight

        mapping, fields = source.mapping, source.variable

        def quantize_host_data(tensors: Arrays) -> Sequence[np.ndarray]:
            return quantize_weight(self._host_data(source, tensors), fields, mapping.input_axis)

        if not isinstance(tensors, QuantizedWeightCache):
            return quantize_host_data(tensors)
        shapes = [w.shape for w in mapping.weights]
        layout: tuple[object, ...] = mapping.axis, mapping.num_shards(self.tensor_parallel)
        layout += (mapping.transpose,)
        if mapping.expert_parallel:  # part of the key on disk, which is older than the name
            layout += ("shared out",)
        key = f"{shapes} {layout} {fields.packed.shape}"
        return tensors.get_quantized(source.tensor_names, key, quantize_host_data)

    def _typed_data(self, source: VariableSource, tensors: Arrays) -> np.ndarray:
        """Host data of a variable in its own dtype; a residual is computed by rounding."""
        data, dtype = self._host_data(source, tensors), source.variable.dtype.as_numpy()
        if source.residual_of_dtype is not None:
            from popxl_addons.optimizers.state_8bit import split_weight

            wide, bits = data.astype(np.float32, copy=False), 8 * dtype.itemsize
            residual: np.ndarray = split_weight(wide, source.residual_of_dtype, bits)[1]
            return residual
        return data.astype(dtype, copy=False)

    def _host_data(self, source: VariableSource, tensors: Arrays) -> np.ndarray:
        """Host data of a variable in the dtype of the tensors that it is read from."""
        if source.is_shared:
            return _resize_amax_history(
                np.asarray(tensors[source.tensor_names[0]]), source.variable.shape
            )
        return source.mapping.to_variable_data(tensors, self.tensor_parallel, source.prefix)

    def to_logical_tensors(
        self,
        read_variable: Callable[[Variable], np.ndarray],
        variables: Variables,
        optimizer: bool = True,
        shard_reader: ShardReader | None = None,
        frozen: bool = True,
    ) -> Arrays:
        """Returns lazy logical tensors, converted from variables when read.

        Reading them in order reads each variable once, and those of one remote buffer in a row.

        Args:
            read_variable: returns the host data of a variable.
            optimizer: True for optimizer state and FP8 state as well.
            shard_reader: reads shards of variables, for tensors that are read shard by shard.
            frozen: True for frozen weights as well.
        """
        sources = self._variable_sources(variables, optimizer)
        sources = [source for source in sources if frozen or source.mapping.trainable]
        return HfNamedTensors(sources, read_variable, self.tensor_parallel, shard_reader)

    def read_gradients(
        self, read_variable: Callable[[Variable], np.ndarray], variables: Variables
    ) -> Arrays:
        """Read gradients from a program's variables, by logical weight name."""
        sources = [
            VariableSource(mapping, tree.grad.get(mapping.path), "")
            for mapping, tree in self._mapping_tree_pairs(variables)
            if mapping.is_updated
        ]
        return HfNamedTensors(sources, read_variable, self.tensor_parallel, None)

    def _mapping_tree_pairs(self, variables: Variables) -> list[tuple[WeightMapping, NamedTensors]]:
        """Pair each mapping with its layer's variables; mappings of one buffer are adjacent."""
        pairs: list[tuple[WeightMapping, NamedTensors]] = []
        for name, trees in variables.items():
            layers = self._layer_trees({name: trees})
            unsorted = [(mapping, tree) for layer, tree in layers for mapping in self.layers[layer]]
            pairs += sorted(unsorted, key=lambda pair: pair[0].path)
        return pairs

    def _layer_trees(self, variables: Variables) -> list[tuple[str, NamedTensors]]:
        """Names and variables of a program's layers; without phases that own no variables."""
        layers: list[tuple[str, NamedTensors]] = []
        for name, trees in variables.items():
            if isinstance(trees, NamedTensors):
                layers += [(name, trees)] if name in self.layers else []
            else:
                layers += zip(self.phases.get(name, ()), trees, strict=True)
        return layers

    def _variable_sources(
        self, variables: Variables, optimizer: bool, fp8: bool = True
    ) -> list[VariableSource]:
        """Variables of weights, optimizer and FP8 state, each with the mapping of its weight."""
        pairs = self._mapping_tree_pairs(variables)
        sources = [
            VariableSource(mapping, tree.fwd.get(mapping.path), "") for mapping, tree in pairs
        ]
        if optimizer:
            state = [
                _optimizer_state_source(mapping, slot, variable)
                for mapping, tree in pairs
                for slot, variable in _optimizer_state_variables(mapping, tree).items()
            ]
            sources += sorted(state, key=lambda source: source.prefix)
        return sources + (self._fp8_sources(pairs) if optimizer and fp8 else [])

    @staticmethod
    def _fp8_sources(
        pairs: Sequence[tuple[WeightMapping, NamedTensors]],
    ) -> list[VariableSource]:
        """FP8 state variables of linear layers with their mappings, named after the weights."""
        sources = []
        for mapping, tree in pairs:
            layer, _, name = mapping.path.rpartition(".")
            if name == "weight" and f"{layer}.product" in tree.fwd:
                state = tree.fwd.get(f"{layer}.product").to_dict().items()
                sources += [
                    VariableSource(mapping, v, f"{FP8_PREFIX}/{slot}/", is_shared=True)
                    for slot, v in state
                ]
        return sorted(sources, key=lambda source: source.prefix)


_DOCS_HINT = "see docs/adding_a_model.md"


def format_missing_mapping(layer: str, variable: str) -> str:
    """Format the message for a program's variable that has no weight mapping."""
    return f"{layer}.{variable} has no mapping in the weight map: {_DOCS_HINT}"


def _weight_mapping_path(variable_name: str, mapped_paths: Collection[str]) -> str | None:
    """Weight-map path of a variable; quantized codes and scales have that of their weight.

    None for the state of an FP8 product, which is no weight.
    """
    variable, _, field = variable_name.rpartition(".")
    if variable.endswith(".product") or variable == "product":
        return None
    if variable not in mapped_paths:
        return variable_name
    from modelling.quantization import QUANT_FIELDS

    return variable if field in QUANT_FIELDS else variable_name


def _optimizer_state_variables(
    mapping: WeightMapping, tree: NamedTensors
) -> Mapping[str, Variable]:
    """A variable's optimizer state by slot (such as a moment); empty without an optimizer."""
    has_state = mapping.is_updated and "optim" in tree
    return tree.optim.get(mapping.path).to_dict() if has_state else {}


def _optimizer_state_source(
    mapping: WeightMapping, slot_name: str, variable: Variable
) -> VariableSource:
    """Optimizer state variable with its mapping; a slot of rows or columns fits the HF weight."""
    slot = STATE_SLOTS[slot_name]
    state_mapping = mapping
    if slot.per == "block":
        state_mapping = mapping.block_scale_mapping(mapping.unsharded_axis)
    elif slot.per in ("row", "column"):
        state_mapping = mapping.axis_moment_mapping(slot.per == "column")
    hf_slot = slot.transposed_slot if mapping.transpose else slot
    prefix = f"{OPTIMIZER_PREFIX}/{hf_slot.name}/"
    return VariableSource(state_mapping, variable, prefix, slot.per == "weight")


def _master_weight_sources(
    pairs: Sequence[tuple[WeightMapping, NamedTensors]],
) -> list[VariableSource]:
    """Master weights and residuals with their mappings, named after the weights."""
    sources = []
    for mapping, tree in pairs:
        state = _optimizer_state_variables(mapping, tree)
        if MASTER_WEIGHT.name in state:
            sources.append(VariableSource(mapping, state[MASTER_WEIGHT.name], ""))
        if RESIDUAL in state:
            dtype = tree.fwd.get(mapping.path).dtype.as_numpy()
            sources.append(VariableSource(mapping, state[RESIDUAL], "", residual_of_dtype=dtype))
    return sources


def _resize_amax_history(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Truncate or zero-pad an FP8 amax history (latest first); other data stay unchanged."""
    if data.ndim < 2 or data.shape == shape:
        return data
    missing = max(shape[1] - data.shape[1], 0)
    return np.pad(data[:, : shape[1]], ((0, 0), (0, missing)))
