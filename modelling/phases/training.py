"""The program of an optimizer step: the same for all families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import popxl
import popxl_addons as addons
from config.sections import RunConfig
from modelling.devices import new_ir
from modelling.fp8 import linear_layers
from modelling.layers.parallel import Groups
from modelling.phases.buffers import InputBuffers, over_layers
from modelling.phases.loss_phase import LossPhase
from modelling.phases.phase import Phase
from modelling.phases.settings import Settings
from modelling.weights import WeightTable
from popxl import ops
from popxl_addons.patterns import apply_pre_alias_patterns


class Layout(Protocol):
    """What a family provides: its phases, and the order in which they run."""

    inputs: InputBuffers
    phases: list[Phase]
    head: LossPhase

    def forward(self, seed: popxl.Tensor | None) -> None:
        """Run all phases forwards, without the loss in training."""
        ...

    def forward_backward(self, seed: popxl.Tensor | None) -> popxl.Tensor:
        """Run all phases but the optimizer's.

        Returns:
            This replica's part of the sum of squares of all gradients, float32 scalar.
        """
        ...


@dataclass(frozen=True)
class TrainingProgram:
    """An Ir that trains, its streams and its variables.

    Attributes:
        inputs: streams of the batch by name, each with `ir.num_host_transfers` transfers a run.
        learning_rate, seed: streams used once for each optimizer step of a run (seed: None if
            nothing is random).
        loss: stream of the loss of each micro-batch; their mean over micro-batches and replicas
            is the loss of the step.
        gradient_norm: stream with the global norm of each optimizer step.
        variables: by phase and layer: `variables[phase name][layer]` has trees `fwd` and `optim`
            (and `grad`, if asked for).
    """

    ir: popxl.Ir
    inputs: Mapping[str, popxl.HostToDeviceStream]
    learning_rate: popxl.HostToDeviceStream
    seed: popxl.HostToDeviceStream | None
    loss: popxl.DeviceToHostStream
    gradient_norm: popxl.DeviceToHostStream
    variables: Mapping[str, list[addons.NamedTensors]]


def build_training(
    config: RunConfig,
    layout_of: Callable[[Settings], Layout],
    gradients: bool = False,
    table: WeightTable | None = None,
) -> TrainingProgram:
    """Build the training program of a configuration.

    Args:
        layout_of: builds the family's phases in the current Ir.
        gradients: let the host read the gradients of the last step, as variables.
        table: the family's weights; Adafactor needs them.
    """
    ir = new_ir(config)
    addons.enable_stochastic_rounding(ir, config.rounds_stochastically)
    iterations = config.execution.device_iterations
    ir.num_host_transfers = config.gradient_accumulation * iterations
    with ir.main_graph:
        settings = Settings(config, Groups.current(config.execution.tensor_parallel), table)
        with linear_layers(config):
            layout = layout_of(settings)
        rate = popxl.h2d_stream((), popxl.float32, "learning_rate")
        seed = None
        if settings.seed_spec is not None:
            seed = popxl.h2d_stream(settings.seed_spec.shape, settings.seed_spec.dtype, "seed")
        norm = popxl.d2h_stream((), popxl.float32, "gradient_norm")
        step = ir.create_graph(lambda: optimizer_step(layout, rate, seed, norm))
        variables = {phase.name: phase.init_variables(gradients) for phase in layout.phases}
        ops.repeat(step, iterations)
    apply_pre_alias_patterns(ir, level="default")
    return TrainingProgram(
        ir, layout.inputs.streams, rate, seed, layout.head.loss_stream, norm, variables
    )


def optimizer_step(
    layout: Layout,
    rate_stream: popxl.HostToDeviceStream,
    seed_stream: popxl.HostToDeviceStream | None,
    norm_stream: popxl.DeviceToHostStream,
) -> None:
    """Forward, backward and optimizer phases, in the current graph."""
    layout.inputs.load()
    for phase in layout.phases:
        phase.begin_step()
    seed = None if seed_stream is None else ops.host_load(seed_stream)
    squares = layout.forward_backward(seed)
    norm = ops.sqrt(ops.collectives.replicated_all_reduce(squares, "add"))
    ops.host_store(norm_stream, norm)
    rate = ops.host_load(rate_stream)
    for phase in layout.phases:
        over_layers(range(phase.entries), _updating(phase), (), (rate, norm))


def _updating(phase: Phase) -> Callable[..., list[popxl.Tensor]]:
    def body(row: popxl.Tensor, rate: popxl.Tensor, norm: popxl.Tensor) -> list[popxl.Tensor]:
        phase.update(row, rate, norm)
        return []

    return body
