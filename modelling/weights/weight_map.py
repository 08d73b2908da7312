"""One weight map, read in both directions.

A model's weights have names and shapes of their own, independent of how a program lays them out:
the *logical* weights, with Hugging Face's names. A row of the table says which logical weights make
up a variable of ours. The same rows convert weights, and tensors of the same shapes such as the
optimizer's moments, to variables and back, and hold the rules for initial values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from checkpoints.arrays import Arrays, LazyArrays
from config.optimizer_state import MASTER_WEIGHT, RESIDUAL, STATE_SLOTS
from modelling.quantisation import QUANT_FIELDS, CachesQuantized, QuantizedWeight, quantize
from modelling.weights.hf_tensor_names import HfTensorNames
from modelling.weights.mapping import (
    EMBEDDING,
    HEAD,
    Weight,
    WeightMapping,
    WeightsError,
    check_presence,
)
from modelling.weights.variables import OPTIMIZER, HfNamedTensors, ShardReader, VariableSource
from popxl import Variable
from popxl.session import LazyValue, VariableShard
from popxl_addons import NamedTensors
from popxl_addons.optimizers.state_8bit import split_weight

Variables = Mapping[str, NamedTensors | Sequence[NamedTensors]]
"""A program's variables: by layer, or by phase for each of its layers, the trees `fwd` (variables),
`optim` (their optimizer state, by variable) and `grad` (their gradients), as far as there are."""

EMBEDDINGS = "embeddings"
"""The layer of the embedding, in every family's table."""

FP8 = "fp8"
"""First part of the names of the FP8 state of linear layers: `fp8/scale/<weight>`."""

EXPERT_GROUP = "/"
"""Before the number of a group of a layer's experts, in its name: `layer.0/1`."""


def without_expert_group(name: str) -> str:
    """The layer that a group of experts is of; a layer's own name."""
    return name.partition(EXPERT_GROUP)[0]


@dataclass(frozen=True)
class TrainableTokens:
    """Rows of a weight that are trained apart from it.

    Attributes:
        delta: name of the tensor with these rows.
        rows: which rows they are.
    """

    delta: str
    rows: Sequence[int]


@dataclass(frozen=True)
class WeightMap:
    """All weights of a model.

    Attributes:
        layers: rows of each layer, in the order of the forward pass, and of each group of its
            experts, where these are phases of their own. A variable that several layers use is a
            row of the one that owns it.
        phases: names of the layers of each phase of a phased program.
        runs: the phases that a family's phase was cut into, by its name, where not all of its
            layers are trained alike.
        tensor_parallel: number of parts that sharded variables are cut into.
        files: what files may have in place of logical weights.
        token_rows: rows that are trained beside a frozen weight, by its name.
    """

    layers: Mapping[str, tuple[WeightMapping, ...]]
    phases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tensor_parallel: int = 1
    hf_names: HfTensorNames = field(default_factory=HfTensorNames)
    phase_splits: Mapping[str, Sequence[str]] = field(default_factory=dict)
    trainable_tokens: Mapping[str, TrainableTokens] = field(default_factory=dict)

    @property
    def mappings(self) -> tuple[WeightMapping, ...]:
        """The rows of all layers."""
        return tuple(mapping for mappings in self.layers.values() for mapping in mappings)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Every logical weight once."""
        return tuple(w for mapping in self.mappings for w in mapping.weights)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all logical weights, by name."""
        return {w.name: w.shape for w in self.weights}

    @property
    def trainable_weights(self) -> tuple[Weight, ...]:
        """The logical weights that training changes."""
        return tuple(w for mapping in self.mappings if mapping.trainable for w in mapping.weights)

    @property
    def has_adapters(self) -> bool:
        """Whether any row has one."""
        return any(mapping.adapters for mapping in self.mappings)

    @property
    def frozen_names(self) -> list[str]:
        """The names of the other logical weights."""
        trained = {w.name for w in self.trainable_weights}
        return [w.name for w in self.weights if w.name not in trained]

    @property
    def vocabulary_names(self) -> list[str]:
        """The weights of the embedding and the head, which have a row for each token."""
        paths = (EMBEDDING, HEAD, HEAD.replace("weight", "bias"))
        return [
            w.name for mapping in self.mappings if mapping.path in paths for w in mapping.weights
        ]

    @property
    def embedding_names(self) -> list[str]:
        """The embedding's names in files: its own, then those of weights that are tied to it."""
        (mapping,) = (mapping for mapping in self.layers[EMBEDDINGS] if mapping.path == EMBEDDING)
        own = mapping.weights[0].name
        return [own, *(alias for alias, name in self.hf_names.aliases.items() if name == own)]

    def filter(self, wanted: Callable[[WeightMapping], bool]) -> WeightMap:
        """The table of some rows alone."""
        layers = {name: tuple(filter(wanted, mappings)) for name, mappings in self.layers.items()}
        names = {
            w.name for mappings in layers.values() for mapping in mappings for w in mapping.weights
        }
        return replace(self, layers=layers, hf_names=self.hf_names.subset(names))

    @property
    def base(self) -> WeightMap:
        """The table without adapters."""
        return self.filter(lambda mapping: not mapping.is_adapter)

    # ---- logical weights ------------------------------------------------------------------------
    def init_weights(self, seed: int) -> Arrays:
        """Initial weights by name, float32, made when asked for. No layout changes them."""
        return LazyArrays({w.name: partial(w.init_values, seed) for w in self.weights})

    def from_hf(self, tensors: Arrays) -> Arrays:
        """The weights of a file under their logical names; see `HfTensorNames`."""
        return self.hf_names.from_hf(tensors, self.shapes)

    def to_hf(self, weights: Arrays) -> Arrays:
        """The inverse of `from_hf`: logical weights as files have them."""
        return self.hf_names.to_hf(weights)

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that a file has the weights of this model; see `HfTensorNames`."""
        self.hf_names.check_shapes(shapes, self.shapes)

    # ---- variables ------------------------------------------------------------------------------
    def check_complete(self, variables: Variables) -> None:
        """Check that every weight of a program has a row, and every row a variable: what has none
        would stay zeros.

        Raises:
            WeightsError: one has none, which is a fault of the family's modules.
        """
        for layer, tree in self._trees(variables):
            mappings = {mapping.path for mapping in self.layers[layer]}
            paths = (_path_of(name, mappings) for name in tree.fwd.keys_flat())
            found = {path for path in paths if path is not None}
            for name in sorted(mappings ^ found):
                missing = f"{layer}.{name}, of the weight map, is not in the program: {_SEE}"
                raise WeightsError(missing if name in mappings else missing_mapping(layer, name))

    def to_variables(
        self, tensors: Arrays, variables: Variables
    ) -> dict[Variable, Callable[[], np.ndarray]]:
        """Functions that make the host data of a program's variables from logical tensors.

        They read the tensors they need, and raise WeightsError if one has the wrong shape. Of
        tensors in a `LazyArrays` a process reads the elements that its devices hold.

        Args:
            tensors: weights by name; if there is optimizer state among them (see `OPTIMIZER`), or
                FP8 state, and in the program, it is converted too. Without optimizer state,
                masters and residuals of weights begin with the weights.

        Raises:
            ValueError: a tensor is missing.
        """
        with_state = any(name.startswith(f"{OPTIMIZER}/") for name in tensors)
        out: dict[Variable, Callable[[], np.ndarray]] = {}
        mappings = self._pairs(variables)
        sources = self._sources(variables, with_state, fp8=False)
        sources += [] if with_state else _master_sources(mappings)
        sources += [p for p in self._fp8_sources(mappings) if p.tensor_names[0] in tensors]
        for source in sources:
            for name in source.tensor_names:
                check_presence(name, tensors)
            if isinstance(source.variable, NamedTensors):
                parts = QuantizedWeight(
                    partial(self._quantized_data, source, tensors), source.variable
                )
                out.update({v: partial(parts.of, v) for v in parts.variables})
            else:
                out[source.variable] = self._reader(source, tensors)
        return out

    def _reader(self, source: VariableSource, tensors: Arrays) -> Callable[[], np.ndarray]:
        """What makes the data of a variable; of what some elements can be had, a part of it."""
        whole = partial(self._typed_data, source, tensors)
        if not isinstance(tensors, LazyArrays):
            return whole

        def some(held: tuple[VariableShard, ...]) -> np.ndarray:
            cuts = zip(source.tensor_names, source.shardings(held), strict=True)
            wanted = {name: partial(tensors.some, name, cut.layout) for name, cut in cuts}
            return self._typed_data(source, LazyArrays(wanted))

        return LazyValue(whole, some)

    def _quantized_data(self, source: VariableSource, tensors: Arrays) -> Sequence[np.ndarray]:
        """The data of a variable in few bits."""
        mapping, parts = source.mapping, source.variable

        def make(tensors: Arrays) -> Sequence[np.ndarray]:
            return quantize(self._host_data(source, tensors), parts, mapping.input_axis)

        if not isinstance(tensors, CachesQuantized):
            return make(tensors)
        shapes = [w.shape for w in mapping.weights]
        cut: tuple[object, ...] = mapping.axis, mapping.num_shards(self.tensor_parallel)
        cut += (mapping.transpose,)
        if mapping.expert_parallel:  # other folders need not say so
            cut += ("shared out",)
        return tensors.packed(source.tensor_names, f"{shapes} {cut} {parts.packed.shape}", make)

    def _typed_data(self, source: VariableSource, tensors: Arrays) -> np.ndarray:
        data, own = self._host_data(source, tensors), source.variable.dtype.as_numpy()
        if source.residual_of_dtype is not None:
            bits = 8 * own.itemsize
            rest: np.ndarray = split_weight(
                data.astype(np.float32, copy=False), source.residual_of_dtype, bits
            )[1]
            return rest
        return data.astype(own, copy=False)

    def _host_data(self, source: VariableSource, tensors: Arrays) -> np.ndarray:
        if source.is_shared:
            return _resize_history(
                np.asarray(tensors[source.tensor_names[0]]), source.variable.shape
            )
        return source.mapping.to_host(tensors, self.tensor_parallel, source.prefix)

    def variables(self, variables: Variables, optimizer: bool = True) -> list[Variable]:
        """The variables that `to_logical` reads, in its order."""
        return [source.variable for source in self._sources(variables, optimizer)]

    def to_logical(
        self,
        read: Callable[[Variable], np.ndarray],
        variables: Variables,
        optimizer: bool = True,
        held: ShardReader | None = None,
        frozen: bool = True,
    ) -> Arrays:
        """The inverse of `to_variables`: logical tensors, made when they are asked for.

        Taken in order, they read each variable once, and those of one remote buffer one after the
        other.

        Args:
            read: gives the host data of a variable.
            held: access to their parts, where tensors are asked for in parts (`ShardSource`).
            frozen: also weights that are not trained.
        """
        sources = self._sources(variables, optimizer)
        sources = [source for source in sources if frozen or source.mapping.trainable]
        return HfNamedTensors(sources, read, self.tensor_parallel, held)

    def gradients(self, read: Callable[[Variable], np.ndarray], variables: Variables) -> Arrays:
        """Gradients by the weight's name, from the variables in the `grad` trees."""
        trained = [
            (mapping, tree) for mapping, tree in self._pairs(variables) if mapping.is_updated
        ]
        sources = [
            VariableSource(mapping, tree.grad.get(mapping.path), "") for mapping, tree in trained
        ]
        return HfNamedTensors(sources, read, self.tensor_parallel, None)

    def _pairs(self, variables: Variables) -> list[tuple[WeightMapping, NamedTensors]]:
        """Each row, and the trees of its layer. Rows of a phase's layers that share a remote buffer
        follow each other."""
        pairs: list[tuple[WeightMapping, NamedTensors]] = []
        for name, trees in variables.items():
            layers = self._trees({name: trees})
            mappings = [(mapping, tree) for layer, tree in layers for mapping in self.layers[layer]]
            pairs += sorted(mappings, key=lambda pair: pair[0].path)
        return pairs

    def _trees(self, variables: Variables) -> list[tuple[str, NamedTensors]]:
        """The layers of a program and their trees. A phase that owns nothing has none."""
        layers: list[tuple[str, NamedTensors]] = []
        for name, trees in variables.items():
            if isinstance(trees, NamedTensors):
                layers += [(name, trees)] if name in self.layers else []
            else:
                layers += zip(self.phases.get(name, ()), trees, strict=True)
        return layers

    def _sources(
        self, variables: Variables, optimizer: bool, fp8: bool = True
    ) -> list[VariableSource]:
        """Weights, then optimizer state and FP8 state; entries of a remote buffer follow each
        other."""
        mappings = self._pairs(variables)
        sources = [
            VariableSource(mapping, tree.fwd.get(mapping.path), "") for mapping, tree in mappings
        ]
        if optimizer:
            state = [
                _state_source(mapping, slot, variable)
                for mapping, tree in mappings
                for slot, variable in _optimizer_state(mapping, tree).items()
            ]
            sources += sorted(state, key=lambda source: source.prefix)
        return sources + (self._fp8_sources(mappings) if optimizer and fp8 else [])

    @staticmethod
    def _fp8_sources(
        mappings: Sequence[tuple[WeightMapping, NamedTensors]],
    ) -> list[VariableSource]:
        """The state of the FP8 products of linear layers, under the names of their weights."""
        sources = []
        for mapping, tree in mappings:
            layer, _, name = mapping.path.rpartition(".")
            if name == "weight" and f"{layer}.product" in tree.fwd:
                state = tree.fwd.get(f"{layer}.product").to_dict().items()
                sources += [
                    VariableSource(mapping, v, f"{FP8}/{slot}/", is_shared=True)
                    for slot, v in state
                ]
        return sorted(sources, key=lambda source: source.prefix)


_SEE = "see docs/adding_a_model.md"


def missing_mapping(layer: str, variable: str) -> str:
    """Return the message for a variable of a program that the weight map does not have."""
    return f"{layer}.{variable} has no row in the weight map: {_SEE}"


def _path_of(name: str, mappings: Collection[str]) -> str | None:
    """The row of a variable of a program, or of a part of a quantized one; None: it is no weight's,
    but the state of an FP8 product."""
    whole, _, part = name.rpartition(".")
    if whole.endswith(".product") or whole == "product":
        return None
    return whole if part in QUANT_FIELDS and whole in mappings else name


def _optimizer_state(mapping: WeightMapping, tree: NamedTensors) -> Mapping[str, Variable]:
    """What an optimizer keeps for a row, as far as the program has it."""
    there = mapping.is_updated and "optim" in tree
    return tree.optim.get(mapping.path).to_dict() if there else {}


def _state_source(mapping: WeightMapping, name: str, variable: Variable) -> VariableSource:
    """Optimizer state, under the name that it has for a weight as Hugging Face turns it."""
    slot = STATE_SLOTS[name]
    own = mapping
    if slot.per == "block":
        own = mapping.block_scales(mapping.unsharded_axis)
    elif slot.per in ("row", "column"):
        own = mapping.axis_moments(slot.per == "column")
    theirs = slot.transposed if mapping.transpose else slot
    return VariableSource(own, variable, f"{OPTIMIZER}/{theirs.name}/", slot.per == "weight")


def _master_sources(mappings: Sequence[tuple[WeightMapping, NamedTensors]]) -> list[VariableSource]:
    """Masters and residuals of weights, with the names of the weights."""
    sources = []
    for mapping, tree in mappings:
        state = _optimizer_state(mapping, tree)
        if MASTER_WEIGHT.name in state:
            sources.append(VariableSource(mapping, state[MASTER_WEIGHT.name], ""))
        if RESIDUAL in state:
            weight = tree.fwd.get(mapping.path).dtype.as_numpy()
            sources.append(VariableSource(mapping, state[RESIDUAL], "", residual_of_dtype=weight))
    return sources


def _resize_history(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Amax histories, latest first, cut or zero-padded to another length; other data unchanged."""
    if data.ndim < 2 or data.shape == shape:
        return data
    missing = max(shape[1] - data.shape[1], 0)
    return np.pad(data[:, : shape[1]], ((0, 0), (0, missing)))
