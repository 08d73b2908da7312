"""Settings of a training, evaluation or generation program that all its phases share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import popxl
from config.model import QuantConfig
from config.sections import RunConfig
from modelling.layers.parallel import ParallelGroups
from modelling.objectives import Objective
from modelling.weights import WeightMap, WeightMapping
from modelling.weights.weight_map import format_missing_mapping
from modelling.weights.weight_mapping import WeightsError, is_quantizable

if TYPE_CHECKING:
    from modelling.phases.teacher_head import TeacherHead
    from popxl_addons.optimizers.adafactor import MatrixLayout

ALL = "*"
"""Key of `PhaseSettings.saved_fractions` for all phases that it does not name."""


@dataclass(frozen=True)
class PhaseSettings:
    """Settings of a run that decide how the graphs of all its phases are built.

    Attributes:
        config: the run's configuration.
        groups: replica groups of data and tensor parallelism.
        weight_map: the model's weights, which say what is trainable and how matrices are laid out;
            None: all weights are trainable.
        saved_fractions: fraction of the layers, by phase, that save their activations (the last
            ones), where `execution.activations` is auto.
        per_pass: micro-batches per pass where `execution.micro_batches_per_pass` is auto; None:
            all.
        saves_matmul_inputs: True if layers that save activations also save the inputs of matmuls.
        objective: what the head computes in place of the config's objective; None: that.
        teacher_head: whose head the student's is held beside; None: none.
    """

    config: RunConfig
    groups: ParallelGroups
    weight_map: WeightMap | None = None
    saved_fractions: Mapping[str, float] = field(default_factory=dict)
    per_pass: int | None = None
    objective: Objective | None = None
    teacher_head: TeacherHead | None = None
    saves_matmul_inputs: bool = False

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that one replica processes in an optimizer step."""
        return self.config.gradient_accumulation

    @property
    def micro_batches_per_pass(self) -> int:
        """Micro-batches that one replica processes in one pass through all layers."""
        if not self.is_training:
            return self.num_micro_batches
        count = self.config.micro_batches_per_pass
        return (self.per_pass or self.num_micro_batches) if count == "auto" else count

    @property
    def num_passes(self) -> int:
        """Passes through all layers per optimizer step."""
        return self.num_micro_batches // self.micro_batches_per_pass

    def num_saved_layers(self, phase: str, num_layers: int) -> int:
        """Number of the phase's layers that save activations; the others recompute them."""
        mode = self.config.execution.activations
        if mode == "auto":
            fraction = self.saved_fractions.get(phase, self.saved_fractions.get(ALL, 0.0))
            return round(fraction * num_layers)
        return num_layers if mode == "keep" else 0

    @property
    def is_training(self) -> bool:
        """True if the program has backward and optimizer phases."""
        return not self.config.model.eval

    @property
    def dtype(self) -> popxl.dtype:
        """Data type of weights and activations."""
        return popxl.dtype.from_name(self.config.model.precision)

    @property
    def gradient_dtype(self) -> popxl.dtype:
        """Data type in which weight gradients are stored."""
        return popxl.dtype.from_name(self.config.training.gradient_dtype)

    @property
    def accumulates_gradients(self) -> bool:
        """True if a pass accumulates gradients over its micro-batches.

        A pass of one micro-batch need not, if the sums over passes are narrower than float32 and
        accumulated separately: a float32 accumulator would only be written and read back.
        """
        single = self.num_passes > 1 and self.micro_batches_per_pass == 1
        return not single or self.gradient_dtype == popxl.float32

    @property
    def activation_shards(self) -> popxl.ReplicaGrouping | None:
        """Replicas over which activations in remote buffers are sharded; None: not sharded."""
        sharded = self.config.execution.shards_activations and self.groups.tensor_parallel > 1
        return self.groups.tp if sharded else None

    @property
    def seed_spec(self) -> popxl.TensorSpec | None:
        """Spec of a phase's random seed; None if the model draws no random numbers."""
        model, adapter = self.config.model, self.config.adapter
        drops = model.has_dropout or (adapter.rank > 0 and adapter.dropout > 0)
        random = drops and not model.eval
        return popxl.TensorSpec((2,), popxl.uint32) if random else None

    def layers_per_phase(self, phase: str, num_layers: int) -> dict[str, int]:
        """Number of layers in each of the phases into which a stack's layers are split.

        Layers with different trainable weights are in different phases; see
        `WeightMap.phase_splits`.
        """
        if self.weight_map is None:
            return {phase: num_layers}
        return {
            name: len(self.weight_map.phases[name])
            for name in self.weight_map.phase_splits.get(phase, [phase])
        }

    def is_phase_trainable(self, phase: str) -> bool:
        """True if training changes any variable that the phase owns."""
        if self.weight_map is None or not self.is_training:
            return self.is_training
        layer = self.weight_map.phases[phase][0]
        return any(mapping.is_updated for mapping in self.weight_map.layers[layer])

    def is_variable_trainable(self, phase: str, variable: str) -> bool:
        """True if training changes the named variable of a phase's layers."""
        return self.weight_map is None or self.weight_mapping(phase, variable).is_updated

    def weight_mapping(self, phase: str, variable: str) -> WeightMapping:
        """Weight mapping (Hugging Face tensors) of the named variable of a phase's layers."""
        assert self.weight_map is not None, "this needs the weight map"
        layer = self.weight_map.phases[phase][0]
        for mapping in self.weight_map.layers[layer]:
            if mapping.path == variable:
                return mapping
        raise WeightsError(format_missing_mapping(layer, variable))

    def quant_config(self, phase: str, variable: str) -> QuantConfig | None:
        """Quantization of a variable that is stored quantized; None: stored as it is."""
        if not self.is_training or self.weight_map is None:
            return None
        return (
            self.config.model.quant
            if is_quantizable(self.weight_mapping(phase, variable))
            else None
        )

    def matrix_layout(self, phase: str, variable: str) -> MatrixLayout:
        """Layout of the matrices in a variable, for optimizers that update weights as matrices."""
        from popxl_addons.optimizers.adafactor import MatrixLayout

        mapping = self.weight_mapping(phase, variable)
        size = None
        if mapping.axis is not None and mapping.is_sharded and not mapping.expert_parallel:
            size = mapping.weight_shape[mapping.axis]
        return MatrixLayout(len(mapping.weights), mapping.axis, self.groups.replicated, size)

    def num_shards(
        self, phase: str, variable: str, shape: tuple[int, ...], grouping: popxl.ReplicaGrouping
    ) -> int:
        """Number of replicas over which a variable is sharded: a group's size or 1.

        Small variables are not sharded, nor are those whose shards would be unequal or would split
        a quantization block of the optimizer state.

        Args:
            shape: shape of the variable on a replica.
        """
        nelms, count = math.prod(shape), grouping.group_size
        is_small = nelms < self.config.execution.rts_weights_threshold
        if is_small or nelms % count:
            return 1
        if self.config.training.optimizer.is_8bit and len(shape) == 2:
            from popxl_addons.optimizers import state_8bit

            axis = self.matrix_layout(phase, variable).unsharded_axis
            return count if state_8bit.QuantBlocks.along_axis(axis, shape, count) else 1
        return count


def with_teacher_head(
    weight_map: WeightMap | None, teacher_head: TeacherHead | None
) -> WeightMap | None:
    """Return the weight map of a student's program; that of the student without a teacher."""
    return (
        weight_map
        if teacher_head is None or weight_map is None
        else teacher_head.extend_weight_map(weight_map)
    )
