"""Builds the program that computes losses for any family: training's phases, forward only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import popxl
import popxl_addons as addons
from config.sections import RunConfig
from modelling.ir_building import build_ir
from modelling.layers.head_loss import LOSS_STATS
from modelling.objectives import Objective
from modelling.phases.phase_plan import PhasePlan
from modelling.phases.settings import PhaseSettings, with_teacher_head
from modelling.phases.step_inputs import StepInputs
from modelling.phases.teacher_head import TeacherHead
from modelling.weights import WeightMap


@dataclass(frozen=True)
class LossProgram:
    """A program that computes losses: its Ir, host streams and variables.

    Attributes:
        inputs: streams of the batch by name, with one transfer per micro-batch.
        loss: stream of the loss of each micro-batch.
        sums: stream of the sums that the loss is computed from; None if the objective has none.
        variables: variables by phase and layer, as in `TrainingProgram`, without `optim`.
    """

    ir: popxl.Ir
    inputs: Mapping[str, popxl.HostToDeviceStream]
    loss: popxl.DeviceToHostStream
    sums: popxl.DeviceToHostStream | None
    variables: Mapping[str, list[addons.NamedTensors]]


def loss_config(config: RunConfig) -> RunConfig:
    """Returns the configuration of a loss program, with a batch of whole micro-batches."""
    e = config.execution
    samples = e.micro_batch_size * e.data_parallel
    batch = samples * max(config.training.global_batch_size // samples, 1)
    return replace(
        config,
        model=replace(config.model, eval=True),
        training=replace(config.training, global_batch_size=batch),
    )


def evaluated_weight_map(weight_map: WeightMap, objective: Objective | None) -> WeightMap:
    """Returns the weights that a loss program reads: without an LM head, if it needs no logits."""
    if objective is None or objective.reads_logits:
        return weight_map
    return weight_map.filter_mappings(lambda mapping: not mapping.path.startswith("lm_head."))


def build_loss_program(
    config: RunConfig,
    build_phases: Callable[[PhaseSettings], PhasePlan],
    weight_map: WeightMap,
    objective: Objective | None = None,
    teacher_head: TeacherHead | None = None,
) -> LossProgram:
    """Build the loss program of a configuration, with `model.eval` set.

    Layers are loaded one after the other, as in training: a model that can be trained can be
    evaluated on the same devices.

    Args:
        objective: what the head computes; None: the objective of the configuration.
        teacher_head: see `PhaseSettings`.
    """
    with build_ir(config) as (ir, groups):
        ir.num_host_transfers = config.gradient_accumulation
        in_program = with_teacher_head(weight_map, teacher_head)
        settings = PhaseSettings(
            config, groups, in_program, objective=objective, teacher_head=teacher_head
        )
        phase_plan = build_phases(settings)
        variables = {phase.name: phase.init_variables() for phase in phase_plan.phases}
        phase_plan.inputs.load_from_host()
        phase_plan.forward(StepInputs())
    head = phase_plan.head
    sums = head.aux_outputs.get(LOSS_STATS)
    return LossProgram(ir, phase_plan.inputs.streams, head.loss_stream, sums, variables)
