"""Training the toy family: its data, weights and sessions."""

from __future__ import annotations

from typing import Any

import numpy as np

import popxl
from config.sections import RunConfig
from data.samples import Batch
from modelling.phases.training import TrainingProgram, build_training_program
from modelling.weights import WeightMap
from tests.modelling.phases.toy import WIDTH, build_toy_phases

STEPS, SAMPLES, RATE = 4, 8, 1e-2


def draw(seed: int = 0) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
    """Weights, the shared scale, and inputs and targets (steps, samples, width)."""
    rng = np.random.default_rng(seed)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(3)]
    x, y = (rng.normal(size=(STEPS, SAMPLES, WIDTH)).astype(np.float32) for _ in range(2))
    return weights, rng.normal(size=WIDTH).astype(np.float32), x, y


def feed(program: TrainingProgram, config: RunConfig, arrays: Batch) -> dict[Any, np.ndarray]:
    """Inputs of one run: (transfers, replicas, micro-batch, ...) of (steps, samples, ...)."""
    execution = config.execution
    transfers, dp = program.ir.num_host_transfers, execution.data_parallel
    shape = (transfers, dp, execution.micro_batch_size, WIDTH)
    inputs: dict[Any, np.ndarray] = {
        program.inputs[name]: np.repeat(a.reshape(shape), execution.tensor_parallel, 1)
        for name, a in arrays.items()
    }
    per_micro_batch = np.ones((transfers, config.num_replicas), np.float32)
    weight = config.gradient_accumulation * dp / SAMPLES
    inputs[program.inputs["weight"]] = per_micro_batch * np.float32(weight)
    inputs[program.learning_rate] = per_micro_batch * np.float32(RATE)
    return inputs


def weights_of(program: TrainingProgram) -> list[popxl.tensor.Variable]:
    """The layers' weights, and the scale that they share."""
    first, *rest = [program.variables["first"][0], *program.variables["rest"]]
    return [first.fwd.w, *(layer.fwd.w for layer in rest), first.fwd.scale]


def toy_session(
    config: RunConfig,
    weights: list[np.ndarray],
    scale: np.ndarray,
    weight_map: WeightMap | None = None,
) -> tuple[TrainingProgram, popxl.Session]:
    """The program of a configuration, compiled, with these weights."""
    program = build_training_program(config, build_toy_phases, weight_map=weight_map)
    session = popxl.Session(program.ir, "cpu")
    session.write_variables_data(dict(zip(weights_of(program), [*weights, scale], strict=True)))
    return program, session
