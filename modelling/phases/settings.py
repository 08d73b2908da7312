"""What all phases of a program have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import popxl
from config.model import QuantConfig
from config.sections import RunConfig
from modelling.layers.parallel import ParallelGroups
from modelling.weights import WeightMap, WeightMapping
from modelling.weights.mapping import WeightsError, is_quantizable_row
from modelling.weights.weight_map import missing_mapping
from popxl_addons.optimizers import state_8bit
from popxl_addons.optimizers.adafactor import MatrixLayout

ALL = "*"
"""In `PhaseSettings.saved_fractions`: phases that it does not name."""


@dataclass(frozen=True)
class PhaseSettings:
    """Facts of a run that graphs are built from.

    Attributes:
        config: the run's configuration.
        groups: replica groups of data and tensor parallelism.
        table: the model's weights: which are trained (None: all), and what optimizers treat one by
            one, or pack together.
        keeping: which fraction of a phase's layers, its last ones, keep their activations, where
            the configuration leaves it open.
        per_pass: see `execution.micro_batches_per_pass`, where the configuration leaves it open;
            None: all.
    """

    config: RunConfig
    groups: ParallelGroups
    weight_map: WeightMap | None = None
    saved_fractions: Mapping[str, float] = field(default_factory=dict)
    per_pass: int | None = None

    @property
    def micro_batches(self) -> int:
        """Micro-batches in an optimizer step on one replica."""
        return self.config.gradient_accumulation

    @property
    def micro_batches_per_pass(self) -> int:
        """Micro-batches that run through all layers before the next ones, on one replica."""
        if not self.training:
            return self.micro_batches
        given = self.config.execution.micro_batches_per_pass
        return (self.per_pass or self.micro_batches) if given == "auto" else given

    @property
    def passes(self) -> int:
        """Passes through all layers in an optimizer step."""
        return self.micro_batches // self.micro_batches_per_pass

    def num_saved_layers(self, phase: str, layers: int) -> int:
        """How many layers of a phase keep their activations for the backward pass."""
        wanted = self.config.execution.activations
        if wanted == "auto":
            return round(
                self.saved_fractions.get(phase, self.saved_fractions.get(ALL, 0.0)) * layers
            )
        return layers if wanted == "keep" else 0

    @property
    def training(self) -> bool:
        """Whether there are backward and optimizer phases, and what they need."""
        return not self.config.model.eval

    @property
    def dtype(self) -> popxl.dtype:
        """Type of weights and activations."""
        return popxl.dtype.from_name(self.config.model.precision)

    @property
    def gradient_dtype(self) -> popxl.dtype:
        """Type of stored gradients of weights."""
        return popxl.dtype.from_name(self.config.training.gradients)

    @property
    def adds_gradients(self) -> bool:
        """True if gradients add up within a pass.

        Not those of one micro-batch, where sums of passes are narrower than float32 and added by
        themselves: in float32 they would only be written and read back.
        """
        alone = self.passes > 1 and self.micro_batches_per_pass == 1
        return not alone or self.gradient_dtype == popxl.float32

    @property
    def activation_shards(self) -> popxl.ReplicaGrouping | None:
        """Replicas over which activations between phases are cut; None: not cut."""
        wanted = self.config.execution.shards_activations and self.groups.tensor_parallel > 1
        return self.groups.tp if wanted else None

    @property
    def seed_spec(self) -> popxl.TensorSpec | None:
        """Spec of the seed of a phase; None if nothing is random."""
        model, adapter = self.config.model, self.config.adapter
        drops = model.drops or (adapter.rank > 0 and adapter.dropout > 0)
        random = drops and not model.eval
        return popxl.TensorSpec((2,), popxl.uint32) if random else None

    def layers_per_phase(self, phase: str, layers: int) -> dict[str, int]:
        """The phases that a family's phase of so many layers is cut into, where not all of them are
        trained alike, and how many layers each has; see `WeightMap.phase_splits`."""
        if self.weight_map is None:
            return {phase: layers}
        return {
            name: len(self.weight_map.phases[name])
            for name in self.weight_map.phase_splits.get(phase, [phase])
        }

    def is_phase_trainable(self, phase: str) -> bool:
        """Whether anything that a phase owns is trained."""
        if self.weight_map is None or not self.training:
            return self.training
        return any(
            row.is_updated for row in self.weight_map.layers[self.weight_map.phases[phase][0]]
        )

    def is_variable_trainable(self, phase: str, variable: str) -> bool:
        """Whether a variable of the layers of a phase is trained."""
        return self.weight_map is None or self.mapping(phase, variable).is_updated

    def mapping(self, phase: str, variable: str) -> WeightMapping:
        """The table's row for a variable of the layers of a phase."""
        assert self.weight_map is not None, "this needs the weight map"
        layer = self.weight_map.phases[phase][0]
        for row in self.weight_map.layers[layer]:
            if row.path == variable:
                return row
        raise WeightsError(missing_mapping(layer, variable))

    def quant(self, phase: str, variable: str) -> QuantConfig | None:
        """How a variable is stored that is expanded before a layer takes it; None: as it is."""
        if not self.training or self.weight_map is None:
            return None
        return (
            self.config.model.quant if is_quantizable_row(self.mapping(phase, variable)) else None
        )

    def matrix_layout(self, phase: str, variable: str) -> MatrixLayout:
        """To which matrices a variable belongs, for optimizers that treat weights as such."""
        row = self.mapping(phase, variable)
        return MatrixLayout(len(row.weights), row.axis, self.groups.replicated)

    def shards(
        self, phase: str, variable: str, shape: tuple[int, ...], grouping: popxl.ReplicaGrouping
    ) -> int:
        """Over how many replicas a variable is sharded, which has a shape on each: of a group, or
        1, also where shards would split a quantization block of the optimizer state."""
        nelms, count = math.prod(shape), grouping.group_size
        small = nelms < self.config.execution.rts_weights_threshold
        if small or nelms % count:
            return 1
        if self.config.training.optimizer.is_8bit and len(shape) == 2:
            axis = self.matrix_layout(phase, variable).unsharded_axis
            return count if state_8bit.QuantBlocks.along_axis(axis, shape, count) else 1
        return count
