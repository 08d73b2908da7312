"""Weights of streamed generation: remote buffers of each phase, loaded one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

import popxl
from modelling.generation.layer_pass import LayerPass
from modelling.phases.buffers import loop_over_layers
from modelling.phases.phase_variables import PhaseVariables
from modelling.phases.settings import PhaseSettings
from modelling.quantization import QUANT_FIELDS
from modelling.weights import WeightMap, WeightMapping
from modelling.weights.weight_map import without_expert_group
from modelling.weights.weight_mapping import EMBEDDING
from popxl import Tensor, ops
from popxl_addons import NamedTensors
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory

TOKENS = "tokens."
"""Begins the names of the embedding's variables, in its phase and in those that borrow them."""


class PhaseWeights:
    """Weights of one phase (layers of one type) in remote buffers, from which layers are loaded.

    Their buffers are those of training, so that a training session can share its entries.

    Args:
        name: name of the phase.
        entries: number of its layers.
        weight_source: the phase that owns the token embedding, if it is another.

    Attributes:
        experts: weights of the layers' experts, if these are a phase in training.
    """

    def __init__(
        self,
        name: str,
        entries: int,
        settings: PhaseSettings,
        weight_source: PhaseWeights | None = None,
    ) -> None:
        self.name, self.entries = name, entries
        self._settings, self._weight_source = settings, weight_source
        self.experts: ExpertGroupWeights | None = None
        self._stores: list[PhaseVariables] = []
        self._loads: dict[tuple[str, ...], Callable[[Tensor], NamedTensors]] = {}

    def add_variables(self, facts: NamedVariableFactories) -> None:
        """Create remote buffers for those variables of a graph that have none yet."""
        existing = {n for store in self._stores for n in store.names}
        shared_prefix = () if self._weight_source is None else TOKENS
        new = {
            n: f
            for n, f in facts.to_dict().items()
            if n not in existing and not n.startswith(shared_prefix)
        }
        if self.experts is not None:
            new = self.experts.add_group_variables(new)
        if new:
            named = NamedVariableFactories.from_dict(new)
            store = PhaseVariables.create_buffers(named, self.name, self.entries, self._settings)
            self._stores.append(store)

    @property
    def variables(self) -> list[NamedTensors]:
        """Create, for each layer, the variables through which the host writes the weights."""
        return [self._create_layer_variables(row) for row in range(self.entries)]

    def _create_layer_variables(self, row: int) -> NamedTensors:
        variables: dict[str, Tensor] = {}
        for store in self._stores:
            prefix = f"{self.name}.{row}"
            new = store.facts.init_remote(store.buffers, row, prefix, empty=True)
            variables |= new.to_dict()
        return NamedTensors(fwd=NamedTensors.from_dict(variables))

    def load_full(self, names: Sequence[str], row: Tensor) -> NamedTensors:
        """Load the named weights of layer `row`, all-gathered over their shards and dequantized."""
        key = tuple(names)
        if key not in self._loads:
            self._loads[key] = self._build_loader(key)
        return self._loads[key](row)

    def _build_loader(self, names: Sequence[str]) -> Callable[[Tensor], NamedTensors]:
        by_store = [[n for n in names if n in store.names] for store in self._stores]
        stores = [
            store.select_stored(n) for store, n in zip(self._stores, by_store, strict=True) if n
        ]
        shared_names = (
            [n for n in names if n.startswith(TOKENS)] if self._weight_source is not None else []
        )
        weight_source = self._weight_source if shared_names else None
        experts = self.experts

        def load_layer(row: Tensor) -> NamedTensors:
            weights: dict[str, Tensor] = {}
            for store in stores:
                weights |= store.dequantize(store.load_full(row)).to_dict()
            if weight_source is not None:
                weights |= weight_source.load_full(
                    shared_names, popxl.constant(0, popxl.int32)
                ).to_dict()
            if experts is not None:
                weights |= experts.load_all_groups(names, row)
            return NamedTensors.from_dict(weights)

        return load_layer

    def run_layers(
        self, layer_pass: LayerPass, layers: range, first_pass_row: int, *loop_invariants: Tensor
    ) -> None:
        """Run all micro-batches through the layers of a range, one layer after the other.

        Args:
            layers: the layers' rows in the phase.
            first_pass_row: row of the first of them in the buffers of the pass.
        """
        offset = first_pass_row - layers.start

        def run_one_layer(row: Tensor, *loop_invariants: Tensor) -> list[Tensor]:
            pass_row = row + offset if offset else row
            layer_pass.run_layer(pass_row, self.load_full(layer_pass.names, row), *loop_invariants)
            return []

        loop_over_layers(layers, run_one_layer, (), loop_invariants)


class ExpertGroupWeights(PhaseWeights):
    """Expert weights in remote buffers by group of experts; all groups of a layer load together.

    Args:
        rows: weight mappings of one group.
    """

    def __init__(
        self, name: str, entries: int, settings: PhaseSettings, rows: Sequence[WeightMapping]
    ) -> None:
        super().__init__(name, entries, settings)
        self._groups = settings.config.execution.expert_groups
        self._axes = {row.path: 0 for row in rows}  # axis of the groups
        self._axes |= {f"{row.path}.{p}": 1 - row.input_axis for row in rows for p in QUANT_FIELDS}

    def add_group_variables(
        self, facts: Mapping[str, VariableFactory]
    ) -> dict[str, VariableFactory]:
        """Create buffers for a layer's expert variables; returns the layer's other variables."""
        experts = {
            n: self._group_variable_factory(n, f) for n, f in facts.items() if n in self._axes
        }
        self.add_variables(NamedVariableFactories.from_dict(experts))
        return {n: f for n, f in facts.items() if n not in experts}

    def _group_variable_factory(self, name: str, full_factory: VariableFactory) -> VariableFactory:
        shape = list(full_factory.shape_on_replica)
        shape[self._axes[name]] //= self._groups
        zeros = np.broadcast_to(np.zeros((), full_factory.dtype.as_numpy()), shape)
        return VariableFactory(
            zeros, full_factory.dtype, replica_grouping=full_factory.replica_grouping
        )

    def load_all_groups(self, names: Sequence[str], row: Tensor) -> dict[str, Tensor]:
        """Load and concatenate the named weights of all expert groups of layer `row`."""
        expert_names = [name for name in names if name in self._axes]
        if not expert_names:
            return {}
        first = row * self._groups
        groups = [self.load_full(expert_names, first + g) for g in range(self._groups)]
        return {
            n: ops.concat([group.get(n) for group in groups], self._axes[n]) for n in expert_names
        }


class ModelWeights:
    """The weights of all phases of a model, grouped by stack (encoder or decoder).

    Args:
        weight_map: of the model.
    """

    def __init__(self, weight_map: WeightMap, settings: PhaseSettings) -> None:
        self._phases: dict[str, list[PhaseWeights]] = {}
        self._first: dict[str, PhaseWeights] = {}  # by its first layer
        weight_source: PhaseWeights | None = None
        for phase, layers in weight_map.phases.items():
            if layers and without_expert_group(layers[0]) != layers[0]:
                self._add_experts(phase, layers, settings)
            elif layers:
                stack = layers[0].split(".")[0]
                has_tokens = any(m.path == EMBEDDING for m in weight_map.layers[layers[0]])
                weight_source = None if has_tokens else weight_source
                weights = PhaseWeights(phase, len(layers), settings, weight_source)
                weight_source = weights if has_tokens else weight_source
                self._phases.setdefault(stack, []).append(weights)
                self._first[layers[0]] = weights

    def _add_experts(self, phase: str, layers: Sequence[str], settings: PhaseSettings) -> None:
        """Attach the expert weights to the phases of the layers that use them."""
        assert settings.weight_map is not None
        phase_weights = self._first[without_expert_group(layers[0])]
        rows = settings.weight_map.layers[layers[0]]
        phase_weights.experts = ExpertGroupWeights(phase, len(layers), settings, rows)

    @property
    def variables(self) -> dict[str, list[NamedTensors]]:
        """Create all variables, by phase and layer (`modelling.weights.Variables`)."""
        all_phases = [p for phases in self._phases.values() for p in phases]
        all_phases += [p.experts for p in all_phases if p.experts is not None]
        return {p.name: p.variables for p in all_phases}

    def first_phase(self, stack: str) -> PhaseWeights:
        """Return the phase that contains the first layer of a stack (encoder or decoder)."""
        return self._phases[stack][0]

    def num_layers(self, stack: str) -> int:
        """Number of layers of a stack (encoder or decoder)."""
        return sum(phase.entries for phase in self._phases[stack])

    def run_stack(
        self,
        stack: str,
        pass_by_type: Sequence[LayerPass],
        runs: Sequence[tuple[int, range]],
        *loop_invariants: Tensor,
    ) -> None:
        """Run all micro-batches through all layers of a stack (encoder or decoder).

        Args:
            pass_by_type: the pass of each layer type.
            runs: see `LayerModules.runs_of_one_type`.
        """
        done, before = [0] * len(pass_by_type), 0
        for phase in self._phases[stack]:
            for type_index, rows in runs:
                stop = min(rows.stop - before, phase.entries)
                local_rows = range(max(rows.start - before, 0), stop)
                if local_rows:
                    phase.add_variables(pass_by_type[type_index].facts)
                    phase.run_layers(
                        pass_by_type[type_index], local_rows, done[type_index], *loop_invariants
                    )
                    done[type_index] += len(local_rows)
            before += phase.entries
