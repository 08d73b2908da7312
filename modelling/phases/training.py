"""The program of an optimizer step: the same for all families."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import popxl
import popxl_addons as addons
from config.sections import RunConfig
from modelling.building import build_ir
from modelling.devices import platform
from modelling.phases.phase_plan import PhasePlan
from modelling.phases.settings import PhaseSettings
from modelling.phases.step_inputs import StepInputs, UpdateInputs
from modelling.weights import WeightMap
from popxl import ops


@dataclass(frozen=True)
class TrainingProgram:
    """An Ir that trains, its streams and its variables.

    Attributes:
        inputs: streams of the batch by name, each with `ir.num_host_transfers` transfers a run.
        learning_rate, seed: streams used once for each optimizer step of a run (seed: None if
            nothing is random).
        loss: stream of the loss of each micro-batch; their mean over micro-batches and replicas
            is the loss of the step.
        aux_outputs: streams of what the head tells of a micro-batch besides, by name, see
            `LMHeadLoss`.
        gradient_norm: stream with the global norm of each optimizer step.
        only_update: stream that says whether a run does the update that is pending and nothing
            else; None: no update is pending after a run.
        variables: by phase and layer: `variables[phase name][layer]` has trees `fwd` and `optim`
            (and `grad`, if asked for).
        layers: phases that may keep their activations, by the kind of their layers.
        undivided: kinds of which all layers keep their activations, or none.
    """

    ir: popxl.Ir
    inputs: Mapping[str, popxl.HostToDeviceStream]
    learning_rate: popxl.HostToDeviceStream
    seed: popxl.HostToDeviceStream | None
    loss: popxl.DeviceToHostStream
    aux_outputs: Mapping[str, popxl.DeviceToHostStream]
    gradient_norm: popxl.DeviceToHostStream
    update_only: popxl.HostToDeviceStream | None
    variables: Mapping[str, list[addons.NamedTensors]]
    phases_by_type: Mapping[str, Sequence[str]]
    all_or_none_types: Set[str]


NOTHING: Mapping[str, float] = {}
"""No phase keeps its activations."""


def build_training(
    config: RunConfig,
    build_phases: Callable[[PhaseSettings], PhasePlan],
    gradients: bool = False,
    weight_map: WeightMap | None = None,
    saved_fractions: Mapping[str, float] = NOTHING,
    per_pass: int | None = None,
) -> TrainingProgram:
    """Build the training program of a configuration.

    Args:
        layout_of: builds the family's phases in the current Ir.
        gradients: let the host read the gradients of the last step, as variables.
        table: the family's weights; Adafactor needs them.
        keeping, per_pass: see `PhaseSettings`.
    """
    iterations = config.execution.device_iterations
    with build_ir(config) as (ir, groups):
        addons.enable_stochastic_rounding(ir, config.rounds_stochastically)
        ir.num_host_transfers = config.gradient_accumulation * iterations
        settings = PhaseSettings(config, groups, weight_map, saved_fractions, per_pass)
        phase_plan = build_phases(settings)
        seed = None
        if settings.seed_spec is not None:
            seed = popxl.h2d_stream(settings.seed_spec.shape, settings.seed_spec.dtype, "seed")
        training_step = TrainingStep(
            phase_plan,
            settings,
            popxl.h2d_stream((), popxl.float32, "learning_rate"),
            seed,
            popxl.d2h_stream((), popxl.float32, "gradient_norm"),
        )
        variables = {phase.name: phase.init_variables(gradients) for phase in phase_plan.phases}
        update_only = None
        if defers_update(config):
            update_only = _run_deferred_updates(training_step, iterations)
        else:
            ops.repeat(ir.create_graph(training_step.run), iterations)
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
        _layers(phase_plan),
        {run.experts.phase.layer for run in phase_plan.order if run.experts is not None},
    )


def _layers(phase_plan: PhasePlan) -> dict[str, list[str]]:
    by_kind: dict[str, list[str]] = defaultdict(list)
    for phase in phase_plan.phases:
        if phase is not phase_plan.head and phase.bwd is not None:
            by_kind[phase.layer].append(phase.name)
    return by_kind


def defers_update(config: RunConfig) -> bool:
    """Whether updates run before the next forward pass; "auto": where that hides their transfers.

    Devices that share the host's memory have none to hide, but those of a disk.
    """
    execution = config.execution
    if execution.update == "auto":
        moves = platform(config) != "cpu" or execution.disk is not None
        return moves and config.rounds_behind
    return execution.update == "behind"


@dataclass(frozen=True)
class TrainingStep:
    """The parts of an optimizer step, added to the current graph, and its streams."""

    phase_plan: PhasePlan
    settings: PhaseSettings
    lr: popxl.HostToDeviceStream
    seed: popxl.HostToDeviceStream | None
    norm: popxl.DeviceToHostStream

    def run(self) -> None:
        """Gradients, and at the end the update."""
        self.update(self.gradients())

    def gradients(self, pending: UpdateInputs | None = None) -> UpdateInputs:
        """Forward and backward phases; where layers are first used, they do a pending update.

        Returns:
            What the update of this step takes.
        """
        step = StepInputs(None if self.seed is None else ops.host_load(self.seed), pending)
        squares = self._one_pass(step) if self.settings.passes == 1 else self._passes(step)
        norm = ops.sqrt(ops.collectives.replicated_all_reduce(squares, "add"))
        ops.host_store(self.norm, norm)
        return UpdateInputs(norm, ops.host_load(self.lr))

    def _one_pass(self, step: StepInputs) -> popxl.Tensor:
        """Micro-batches forwards and backwards through all layers; see `Layout.backward`."""
        self.phase_plan.inputs.load()
        self.phase_plan.forward(step)
        return self.phase_plan.backward(step)

    def _passes(self, step: StepInputs) -> popxl.Tensor:
        """All passes of a step: the first does the pending update, the last completes gradients.
        Those between them are a loop of the program."""
        passes, count = self.settings.passes, self.settings.micro_batches_per_pass

        def number(micro_batch: int) -> popxl.Tensor:
            return popxl.constant(micro_batch, popxl.int32)

        self._one_pass(replace(step, first_micro_batch=number(0), is_last=False))
        later = replace(step, update=None, is_first=False)

        def body(first: popxl.Tensor, *seed: popxl.Tensor) -> popxl.Tensor:
            given = replace(later, first_micro_batch=first, is_last=False)
            self._one_pass(given.with_tensors([*seed, first]))
            return first + count

        if passes > 2:
            seeds = [] if step.seed is None else [step.seed]
            graph = popxl.gir().create_graph(body, number(count), *seeds)
            ops.repeat(graph, passes - 2, number(count), *seeds)
        return self._one_pass(replace(later, first_micro_batch=number(count * (passes - 1))))

    def update(self, update: UpdateInputs) -> None:
        """The optimizer phases."""
        self.phase_plan.update(update)


def _run_deferred_updates(step: TrainingStep, iterations: int) -> popxl.HostToDeviceStream:
    """Run optimizer steps, each with the update of the one before it in its forward pass.

    What the last update takes waits in variables for the next run. Before the first step these hold
    a norm that is not finite, as after a step that is left out: the update changes nothing.

    Returns:
        See `TrainingProgram.update_only`.
    """
    ir = popxl.gir()
    norm = popxl.variable(math.nan, popxl.float32, name="pending_norm")
    lr = popxl.variable(0.0, popxl.float32, name="pending_lr")

    def one_step(norm: popxl.Tensor, lr: popxl.Tensor) -> list[popxl.Tensor]:
        return step.gradients(UpdateInputs(norm, lr)).tensors

    def steps(norm: popxl.Tensor, lr: popxl.Tensor) -> list[popxl.Tensor]:
        return list(ops.repeat(ir.create_graph(one_step, norm, lr), iterations, norm, lr))

    def update(norm: popxl.Tensor, lr: popxl.Tensor) -> list[popxl.Tensor]:
        step.update(UpdateInputs(norm, lr))
        return [popxl.constant(math.nan, popxl.float32), lr + 0]

    update_only = popxl.h2d_stream((), popxl.bool, "update_only")
    new_norm, new_rate = ops.conditional(
        ops.host_load(update_only),
        ir.create_graph(update, norm, lr),
        ir.create_graph(steps, norm, lr),
        [norm, lr],
        [norm, lr],
    )
    ops.var_updates.copy_var_update_(norm, new_norm)
    ops.var_updates.copy_var_update_(lr, new_rate)
    return update_only
