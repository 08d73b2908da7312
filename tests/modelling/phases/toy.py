"""A toy family: residual tanh layers and a squared error, in phases."""

from __future__ import annotations

import numpy as np

import popxl
import popxl_addons as addons
from config.sections import Execution, Model, Optimizer, RunConfig, Training
from config.sections import LearningRate as Rate
from modelling.phases import (
    ActivationBuffers,
    InputBuffers,
    LossPhase,
    Phase,
    PhasePlan,
    PhaseRun,
    PhaseSettings,
)
from modelling.weights import Weight, WeightMap, WeightMapping
from popxl import ops

WIDTH = 12


class Layer(addons.Module):
    """x + tanh(x w) * scale, with a scale that all layers share."""

    def build(self, x: popxl.Tensor, seed: popxl.Tensor | None = None) -> popxl.Tensor:
        w = self.add_variable_input("w", lambda: np.zeros((WIDTH, WIDTH), np.float32))
        scale = self.add_variable_input("scale", lambda: np.zeros(WIDTH, np.float32))
        return x + ops.tanh(x @ w) * scale


class Loss(addons.Module):
    """weight * sum of (x - y)^2."""

    def build(
        self,
        x: popxl.Tensor,
        y: popxl.Tensor,
        weight: popxl.Tensor,
        seed: popxl.Tensor | None = None,
    ) -> popxl.Tensor:
        error = x - y
        return ops.sum(error * error) * weight


def build_toy_phases(settings: PhaseSettings) -> PhasePlan:
    """The first layer, which lends its scale, the others and the loss."""
    batch, layers = settings.config.execution.micro_batch_size, settings.config.model.layers
    spec, scalar = (popxl.TensorSpec(shape, popxl.float32) for shape in ((batch, WIDTH), ()))
    inputs = InputBuffers({"x": spec, "y": spec, "weight": scalar}, settings)
    chain = ActivationBuffers(spec, settings, requires_grad=settings.is_phase_trainable("first"))
    first = Phase("first", Layer(), inputs.layer_ios(["x"]), [chain.last_row], settings)
    lent = {"scale": first}
    x, y = chain.reserve_rows(layers - 1, settings.is_phase_trainable("rest"))
    rest = Phase("rest", Layer(), {"x": x}, [y], settings, layers - 1, lent)
    ends = {"x": chain.last_row} | inputs.layer_ios(["y", "weight"])
    head = LossPhase("head", Loss(), ends, settings)
    return PhasePlan(
        inputs, [PhaseRun(phase, range(phase.num_layers)) for phase in (first, rest, head)]
    )


def toy_weight_map(*frozen: str) -> WeightMap:
    """The weights of three layers, of which some are frozen: w0, w1, w2, scale."""

    def row(path: str, name: str, *shape: int) -> WeightMapping:
        return WeightMapping(path, (Weight(name, shape),), trainable=name not in frozen)

    layers = {str(i): (row("w", f"w{i}", WIDTH, WIDTH),) for i in range(3)}
    layers["0"] += (row("scale", "scale", WIDTH),)
    return WeightMap(layers, {"first": ("0",), "rest": ("1", "2")})


def toy_config(
    data_parallel: int = 1,
    tensor_parallel: int = 1,
    micro_batch_size: int = 2,
    global_batch_size: int = 8,
    device_iterations: int = 1,
) -> RunConfig:
    """Three layers, AdamW with clipping, everything sharded that can be."""
    optimizer = Optimizer(learning_rate=Rate(maximum=1e-2), weight_decay=0.1, gradient_clipping=1.0)
    return RunConfig(
        family="toy",
        model=Model(layers=3, hidden_size=WIDTH, sequence_length=1),
        training=Training(global_batch_size=global_batch_size, optimizer=optimizer),
        execution=Execution(
            micro_batch_size=micro_batch_size,
            data_parallel=data_parallel,
            tensor_parallel=tensor_parallel,
            device_iterations=device_iterations,
            rts_weights_threshold=8,
        ),
    )
