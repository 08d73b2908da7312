"""Builds the phases at the end of a model: output layer and loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import popxl
from modelling.layers import HeadLoss
from modelling.layers.output_layer import PooledHeadLoss, as_lm_head
from modelling.phases.buffers import InputBuffers, LayerIO
from modelling.phases.loss_phase import LossPhase
from modelling.phases.phase import Phase
from modelling.phases.phase_plan import PhaseRun
from modelling.phases.settings import PhaseSettings

if TYPE_CHECKING:
    from modelling.phases.batch_loss_phase import BatchLossPhase


def set_objective(head: HeadLoss, settings: PhaseSettings) -> None:
    """Set what an output layer computes, with the teacher that it compares with."""
    if settings.objective is not None:
        head.objective = settings.objective
    elif settings.teacher_head is not None:
        as_lm_head(head).set_teacher(
            settings.teacher_head.build_head(), settings.teacher_head.states
        )


def build_loss_phases(
    head: HeadLoss,
    activations: Mapping[str, LayerIO],
    inputs: InputBuffers,
    settings: PhaseSettings,
    shared: Mapping[str, Phase] | None = None,
) -> tuple[PhaseRun, BatchLossPhase | None]:
    """Build the phases of the output layer and of a loss of the whole batch, if it is one.

    Args:
        activations: outputs of the last layer, by name.
        inputs: of the step, with those of the head's objective.
        shared: variables of the head that other phases own.
    """
    objective = head.objective
    if not objective.is_of_batch:
        head_inputs = {**activations, **inputs.layer_ios(objective.input_names)}
        return PhaseRun(LossPhase("head", head, head_inputs, settings, shared), range(1)), None
    from modelling.layers.batch_loss import BatchLoss
    from modelling.objectives import Contrastive
    from modelling.phases.batch_loss_phase import (
        BatchLossPhase,
        SequenceVectorLayer,
        VectorBuffers,
        VectorPhase,
    )

    assert isinstance(head, PooledHeadLoss)
    assert isinstance(objective, Contrastive)
    x = activations["x"]
    sequences = settings.config.execution.micro_batch_size * objective.sequences_per_sample
    spec = popxl.TensorSpec((sequences, x.spec.shape[-1]), popxl.float32)
    vectors = VectorBuffers(spec, settings)
    head_inputs = {"x": x, **inputs.layer_ios(objective.token_inputs)}
    outputs = [vectors.layer_io]
    phase = VectorPhase("head", SequenceVectorLayer(head), head_inputs, outputs, settings)
    loss = BatchLossPhase(BatchLoss(objective), vectors, inputs, settings, phase.vector_stream)
    return PhaseRun(phase, range(1)), loss
