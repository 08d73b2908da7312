"""The program of the loss alone: the forward phases of training, for any family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import popxl
import popxl_addons as addons
from config.sections import RunConfig
from modelling.building import build_ir
from modelling.layers.lm_head_loss import LOSS_STATS
from modelling.phases.phase_plan import PhasePlan
from modelling.phases.settings import PhaseSettings
from modelling.phases.step_inputs import StepInputs
from modelling.weights import WeightMap


@dataclass(frozen=True)
class LossProgram:
    """An Ir that computes losses, its streams and its variables.

    Attributes:
        inputs: streams of the batch by name, each with a transfer for each micro-batch.
        loss: stream of the loss of each micro-batch.
        sums: stream of what it is a function of; None: the objective does not tell.
        variables: as `modelling.phases.training.TrainingProgram` has them, without `optim`.
    """

    ir: popxl.Ir
    inputs: Mapping[str, popxl.HostToDeviceStream]
    loss: popxl.DeviceToHostStream
    sums: popxl.DeviceToHostStream | None
    variables: Mapping[str, list[addons.NamedTensors]]


def build_loss(
    config: RunConfig, build_phases: Callable[[PhaseSettings], PhasePlan], weight_map: WeightMap
) -> LossProgram:
    """Build the program of a configuration, whose `model.eval` must be set.

    Layers visit the device one after the other, as in training, so that a model which can be
    trained can be evaluated.
    """
    with build_ir(config) as (ir, groups):
        ir.num_host_transfers = config.gradient_accumulation
        phase_plan = build_phases(PhaseSettings(config, groups, weight_map))
        variables = {phase.name: phase.init_variables() for phase in phase_plan.phases}
        phase_plan.inputs.load()
        phase_plan.forward(StepInputs())
    head = phase_plan.head
    sums = head.aux_outputs.get(LOSS_STATS)
    return LossProgram(ir, phase_plan.inputs.streams, head.loss_stream, sums, variables)
