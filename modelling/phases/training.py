"""Builds the training program of any family: forward, backward and optimizer phases."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import popxl
import popxl_addons as addons
from config.sections import RunConfig
from modelling.devices import resolve_platform
from modelling.ir_building import build_ir
from modelling.phases.phase_plan import PhasePlan
from modelling.phases.settings import PhaseSettings, with_teacher_head
from modelling.phases.step_inputs import StepInputs, UpdateInputs
from modelling.weights import WeightMap
from popxl import ops

if TYPE_CHECKING:
    from modelling.phases.teacher_head import TeacherHead


@dataclass(frozen=True)
class TrainingProgram:
    """A training program: its Ir, host streams and variables.

    Attributes:
        inputs: streams of the batch by name, each with `ir.num_host_transfers` transfers per run.
        learning_rate: stream with one transfer per optimizer step of a run.
        seed: stream with one transfer per optimizer step of a run; None if nothing is random.
        loss: stream of the loss of each micro-batch; the mean over micro-batches and replicas is
            the loss of the step.
        aux_outputs: streams of the head's further outputs per micro-batch, by name.
        grad_norm: stream of the global gradient norm of each optimizer step.
        update_only: stream of a bool: True makes a run do the pending update and nothing else;
            None if no update is pending after a run.
        variables: `variables[phase][layer]` has the trees `fwd` and `optim`, and `grad` if
            gradients were requested.
        phases_by_type: names of the phases that can save activations, by layer type.
        all_or_none_types: layer types of which all layers save activations, or none.
    """

    ir: popxl.Ir
    inputs: Mapping[str, popxl.HostToDeviceStream]
    learning_rate: popxl.HostToDeviceStream
    seed: popxl.HostToDeviceStream | None
    loss: popxl.DeviceToHostStream
    aux_outputs: Mapping[str, popxl.DeviceToHostStream]
    grad_norm: popxl.DeviceToHostStream
    update_only: popxl.HostToDeviceStream | None
    variables: Mapping[str, list[addons.NamedTensors]]
    phases_by_type: Mapping[str, Sequence[str]]
    all_or_none_types: Set[str]


RECOMPUTE_ALL: Mapping[str, float] = {}
"""No layer saves its activations."""


def build_training_program(
    config: RunConfig,
    build_phases: Callable[[PhaseSettings], PhasePlan],
    with_gradients: bool = False,
    weight_map: WeightMap | None = None,
    saved_fractions: Mapping[str, float] = RECOMPUTE_ALL,
    per_pass: int | None = None,
    teacher_head: TeacherHead | None = None,
    saves_matmul_inputs: bool = False,
) -> TrainingProgram:
    """Build the training program of a configuration.

    Args:
        build_phases: builds the family's phases in the current Ir.
        with_gradients: True to create variables with the gradients of the last step for the host.
        weight_map: the model's weights; Adafactor needs them.
        saved_fractions, per_pass, teacher_head, saves_matmul_inputs: fields of `PhaseSettings`.
    """
    iterations = config.execution.device_iterations
    with build_ir(config) as (ir, groups):
        if config.rounds_stochastically:
            addons.enable_stochastic_rounding(ir)
        ir.num_host_transfers = config.gradient_accumulation * iterations
        in_program = with_teacher_head(weight_map, teacher_head)
        settings = PhaseSettings(
            config,
            groups,
            in_program,
            saved_fractions,
            per_pass,
            teacher_head=teacher_head,
            saves_matmul_inputs=saves_matmul_inputs,
        )
        phase_plan = build_phases(settings)
        seed = None
        if settings.seed_spec is not None:
            seed = popxl.h2d_stream(settings.seed_spec.shape, settings.seed_spec.dtype, "seed")
        training_step = TrainingStep(
            phase_plan,
            settings,
            popxl.h2d_stream((), popxl.float32, "learning_rate"),
            seed,
            popxl.d2h_stream((), popxl.float32, "grad_norm"),
        )
        variables = {
            phase.name: phase.init_variables(with_gradients) for phase in phase_plan.phases
        }
        update_only = None
        if defers_update(config):
            update_only = _run_deferred_updates(training_step, iterations)
        else:
            ops.repeat(ir.create_graph(training_step.run_step), iterations)
    return TrainingProgram(
        ir,
        phase_plan.inputs.streams,
        training_step.lr,
        training_step.seed,
        phase_plan.head.loss_stream,
        phase_plan.head.aux_outputs,
        training_step.norm,
        update_only,
        variables,
        _phases_by_type(phase_plan),
        {run.experts.phase.layer_type for run in phase_plan.order if run.experts is not None},
    )


def _phases_by_type(phase_plan: PhasePlan) -> dict[str, list[str]]:
    """Names of phases with a backward pass, without the loss phase, by type of their layers."""
    names: dict[str, list[str]] = defaultdict(list)
    for phase in phase_plan.phases:
        if phase is not phase_plan.head and phase.bwd is not None:
            names[phase.layer_type].append(phase.name)
    return names


def defers_update(config: RunConfig) -> bool:
    """True if the optimizer update of a step runs in the next step's forward pass.

    "auto": if that hides transfers.

    A device that shares the host's memory has no transfers to hide, except those of a disk.
    """
    execution = config.execution
    if execution.update == "auto":
        has_transfers = resolve_platform(config) != "cpu" or execution.disk is not None
        return has_transfers and config.can_defer_update
    return execution.update == "deferred"


@dataclass(frozen=True)
class TrainingStep:
    """Host streams of an optimizer step, and methods that add its stages to the current graph."""

    phase_plan: PhasePlan
    settings: PhaseSettings
    lr: popxl.HostToDeviceStream
    seed: popxl.HostToDeviceStream | None
    norm: popxl.DeviceToHostStream

    def run_step(self) -> None:
        """Run forward, backward and optimizer phases of a step."""
        self.update(self.compute_gradients())

    def compute_gradients(self, pending_update: UpdateInputs | None = None) -> UpdateInputs:
        """Run forward and backward phases; each layer runs its pending update before its first use.

        Returns:
            The inputs of this step's update.
        """
        step = StepInputs(None if self.seed is None else ops.host_load(self.seed), pending_update)
        sum_squares = (
            self._run_pass(step) if self.settings.num_passes == 1 else self._run_passes(step)
        )
        norm = ops.sqrt(ops.collectives.replicated_all_reduce(sum_squares, "add"))
        ops.host_store(self.norm, norm)
        return UpdateInputs(norm, ops.host_load(self.lr))

    def _run_pass(self, step: StepInputs) -> popxl.Tensor:
        """Run one pass over all layers, forward and backward; returns as `PhasePlan.backward`."""
        self.phase_plan.inputs.load_from_host()
        self.phase_plan.forward(step)
        return self.phase_plan.backward(step)

    def _run_passes(self, step: StepInputs) -> popxl.Tensor:
        """Run all forward and backward passes of a step; returns as `PhasePlan.backward`.

        The first pass runs the pending update, the last completes the gradients, and those between
        them are a loop of the program.
        """
        passes, count = self.settings.num_passes, self.settings.micro_batches_per_pass

        def micro_batch_index(micro_batch: int) -> popxl.Tensor:
            return popxl.constant(micro_batch, popxl.int32)

        self._run_pass(replace(step, first_micro_batch=micro_batch_index(0), is_last=False))
        later = replace(step, update=None, is_first=False)

        def run_pass(first: popxl.Tensor, *seed: popxl.Tensor) -> popxl.Tensor:
            inputs = replace(later, first_micro_batch=first, is_last=False)
            self._run_pass(inputs.with_tensors([*seed, first]))
            return first + count

        if passes > 2:
            seeds = [] if step.seed is None else [step.seed]
            graph = popxl.gir().create_graph(run_pass, micro_batch_index(count), *seeds)
            ops.repeat(graph, passes - 2, micro_batch_index(count), *seeds)
        return self._run_pass(
            replace(later, first_micro_batch=micro_batch_index(count * (passes - 1)))
        )

    def update(self, update_inputs: UpdateInputs) -> None:
        """Run the optimizer update of all phases."""
        self.phase_plan.update(update_inputs)


def _run_deferred_updates(step: TrainingStep, iterations: int) -> popxl.HostToDeviceStream:
    """Run optimizer steps, each with the previous step's update in its forward pass.

    The inputs of the last update wait in variables for the next run. Before the first step the norm
    among them is NaN, as after a skipped step, so that update changes nothing.

    Returns:
        The stream `TrainingProgram.update_only`.
    """
    ir = popxl.gir()
    norm = popxl.variable(math.nan, popxl.float32, name="pending_norm")
    lr = popxl.variable(0.0, popxl.float32, name="pending_lr")

    def one_step(norm: popxl.Tensor, lr: popxl.Tensor) -> list[popxl.Tensor]:
        return step.compute_gradients(UpdateInputs(norm, lr)).tensors

    def run_steps(norm: popxl.Tensor, lr: popxl.Tensor) -> list[popxl.Tensor]:
        return list(ops.repeat(ir.create_graph(one_step, norm, lr), iterations, norm, lr))

    def run_update(norm: popxl.Tensor, lr: popxl.Tensor) -> list[popxl.Tensor]:
        step.update(UpdateInputs(norm, lr))
        return [popxl.constant(math.nan, popxl.float32), lr + 0]

    update_only = popxl.h2d_stream((), popxl.bool, "update_only")
    new_norm, new_lr = ops.conditional(
        ops.host_load(update_only),
        ir.create_graph(run_update, norm, lr),
        ir.create_graph(run_steps, norm, lr),
        [norm, lr],
        [norm, lr],
    )
    ops.var_updates.copy_var_update_(norm, new_norm)
    ops.var_updates.copy_var_update_(lr, new_lr)
    return update_only
