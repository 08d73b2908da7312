"""The program of an optimizer step: the same for all families."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import popxl
import popxl_addons as addons
from config.sections import RunConfig
from modelling.building import building
from modelling.devices import platform
from modelling.phases.layout import Layout
from modelling.phases.settings import Settings
from modelling.phases.step import StepInputs, Update
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
        told: streams of what the head tells of a micro-batch besides, by name, see `LMHeadLoss`.
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
    told: Mapping[str, popxl.DeviceToHostStream]
    gradient_norm: popxl.DeviceToHostStream
    only_update: popxl.HostToDeviceStream | None
    variables: Mapping[str, list[addons.NamedTensors]]
    layers: Mapping[str, Sequence[str]]
    undivided: Set[str]


NOTHING: Mapping[str, float] = {}
"""No phase keeps its activations."""


def build_training(
    config: RunConfig,
    layout_of: Callable[[Settings], Layout],
    gradients: bool = False,
    weight_map: WeightMap | None = None,
    keeping: Mapping[str, float] = NOTHING,
    per_pass: int | None = None,
) -> TrainingProgram:
    """Build the training program of a configuration.

    Args:
        layout_of: builds the family's phases in the current Ir.
        gradients: let the host read the gradients of the last step, as variables.
        table: the family's weights; Adafactor needs them.
        keeping, per_pass: see `Settings`.
    """
    iterations = config.execution.device_iterations
    with building(config) as (ir, groups):
        addons.enable_stochastic_rounding(ir, config.rounds_stochastically)
        ir.num_host_transfers = config.gradient_accumulation * iterations
        settings = Settings(config, groups, weight_map, keeping, per_pass)
        layout = layout_of(settings)
        seed = None
        if settings.seed_spec is not None:
            seed = popxl.h2d_stream(settings.seed_spec.shape, settings.seed_spec.dtype, "seed")
        optimizer_step = OptimizerStep(
            layout,
            settings,
            popxl.h2d_stream((), popxl.float32, "learning_rate"),
            seed,
            popxl.d2h_stream((), popxl.float32, "gradient_norm"),
        )
        variables = {phase.name: phase.init_variables(gradients) for phase in layout.phases}
        only_update = None
        if updates_behind(config):
            only_update = _run_with_updates_behind(optimizer_step, iterations)
        else:
            ops.repeat(ir.create_graph(optimizer_step.whole), iterations)
    return TrainingProgram(
        ir,
        layout.inputs.streams,
        optimizer_step.rate,
        optimizer_step.seed,
        layout.head.loss_stream,
        layout.head.told,
        optimizer_step.norm,
        only_update,
        variables,
        _layers(layout),
        {stage.experts.phase.layer for stage in layout.order if stage.experts is not None},
    )


def _layers(layout: Layout) -> dict[str, list[str]]:
    by_kind: dict[str, list[str]] = defaultdict(list)
    for phase in layout.phases:
        if phase is not layout.head and phase.bwd is not None:
            by_kind[phase.layer].append(phase.name)
    return by_kind


def updates_behind(config: RunConfig) -> bool:
    """Whether updates run before the next forward pass; "auto": where that hides their transfers.

    Devices that share the host's memory have none to hide, but those of a disk.
    """
    execution = config.execution
    if execution.update == "auto":
        moves = platform(config) != "cpu" or execution.disk is not None
        return moves and config.rounds_behind
    return execution.update == "behind"


@dataclass(frozen=True)
class OptimizerStep:
    """The parts of an optimizer step, added to the current graph, and its streams."""

    layout: Layout
    settings: Settings
    rate: popxl.HostToDeviceStream
    seed: popxl.HostToDeviceStream | None
    norm: popxl.DeviceToHostStream

    def whole(self) -> None:
        """Gradients, and at the end the update."""
        self.update(self.gradients())

    def gradients(self, pending: Update | None = None) -> Update:
        """Forward and backward phases; where layers are first used, they do a pending update.

        Returns:
            What the update of this step takes.
        """
        step = StepInputs(None if self.seed is None else ops.host_load(self.seed), pending)
        squares = self._one_pass(step) if self.settings.passes == 1 else self._passes(step)
        norm = ops.sqrt(ops.collectives.replicated_all_reduce(squares, "add"))
        ops.host_store(self.norm, norm)
        return Update(norm, ops.host_load(self.rate))

    def _one_pass(self, step: StepInputs) -> popxl.Tensor:
        """Micro-batches forwards and backwards through all layers; see `Layout.backward`."""
        self.layout.inputs.load()
        self.layout.forward(step)
        return self.layout.backward(step)

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
            self._one_pass(given.of([*seed, first]))
            return first + count

        if passes > 2:
            seeds = [] if step.seed is None else [step.seed]
            graph = popxl.gir().create_graph(body, number(count), *seeds)
            ops.repeat(graph, passes - 2, number(count), *seeds)
        return self._one_pass(replace(later, first_micro_batch=number(count * (passes - 1))))

    def update(self, update: Update) -> None:
        """The optimizer phases."""
        self.layout.update(update)


def _run_with_updates_behind(step: OptimizerStep, iterations: int) -> popxl.HostToDeviceStream:
    """Run optimizer steps, each with the update of the one before it in its forward pass.

    What the last update takes waits in variables for the next run. Before the first step these hold
    a norm that is not finite, as after a step that is left out: the update changes nothing.

    Returns:
        See `TrainingProgram.only_update`.
    """
    ir = popxl.gir()
    norm = popxl.variable(math.nan, popxl.float32, name="pending_norm")
    rate = popxl.variable(0.0, popxl.float32, name="pending_rate")

    def one_step(norm: popxl.Tensor, rate: popxl.Tensor) -> list[popxl.Tensor]:
        return step.gradients(Update(norm, rate)).tensors

    def steps(norm: popxl.Tensor, rate: popxl.Tensor) -> list[popxl.Tensor]:
        return list(ops.repeat(ir.create_graph(one_step, norm, rate), iterations, norm, rate))

    def update(norm: popxl.Tensor, rate: popxl.Tensor) -> list[popxl.Tensor]:
        step.update(Update(norm, rate))
        return [popxl.constant(math.nan, popxl.float32), rate + 0]

    only_update = popxl.h2d_stream((), popxl.bool, "only_update")
    new_norm, new_rate = ops.conditional(
        ops.host_load(only_update),
        ir.create_graph(update, norm, rate),
        ir.create_graph(steps, norm, rate),
        [norm, rate],
        [norm, rate],
    )
    ops.var_updates.copy_var_update_(norm, new_norm)
    ops.var_updates.copy_var_update_(rate, new_rate)
    return only_update
