"""What a configured model's program needs, in the application's terms."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import popxl
from config.machines import Machine
from config.run import Device
from config.sections import RunConfig
from modelling.generation import build_generation
from modelling.generation.strategies import strategy_of
from modelling.phases.training import build_training
from modelling.residence import is_automatic, place_on
from modelling.spec import family_of
from modelling.weights import WeightTable

FLOAT32 = 4  # bytes of an element of a gradient or a moment


@dataclass(frozen=True)
class Needs:
    """A program's plan and what it is made of.

    Attributes:
        kind: "finetuning" or "inference".
        traced: the program, for its timeline.
        parameters: number of weights of the model.
        state: bytes of weights, and in fine-tuning of gradients, moments and masters, once.
        moments: bytes of the moments.
        placement: which entries the plan chose to stay on the device.
        samples: samples that a run of the program takes, over all replicas.
    """

    kind: str
    config: RunConfig
    traced: popxl.plan.Traced
    plan: popxl.plan.Plan
    parameters: int
    state: int
    samples: int
    moments: int = 0
    placement: popxl.plan.Placement | None = None

    @property
    def flops_per_sample(self) -> float:
        """Operations of matrix products for one sample, recomputation included."""
        return self.plan.flops * self.plan.replicas / self.samples


def placed(needs: Needs, machine: Machine) -> Needs:
    """What a program needs on a machine: there the plan may choose what stays on the device."""
    by_plan = needs.kind == "finetuning" and machine.platform != "cpu"
    if not by_plan or not is_automatic(needs.config):
        return needs
    placement = place_on(needs.traced, needs.config, machine)
    return replace(needs, plan=needs.traced.plan(), placement=placement)


def finetuning_needs(config: RunConfig, platform: str = "cpu") -> Needs:
    """What fine-tuning needs, traced for a platform."""
    family = family_of(config)
    table = family.weights(config)
    program = build_training(_on(platform, config), family.layout, table=table)
    traced = popxl.plan.trace(program.ir, platform)
    count, optimizer = _parameters(table), config.training.optimizer
    shapes = [s for w in table.weights for s in optimizer.state(w.shape).values()]
    moments, masters = FLOAT32 * sum(map(math.prod, shapes)), FLOAT32 * count * config.has_masters
    state = count * (_itemsize(config) + FLOAT32) + moments + masters
    samples = config.training.global_batch_size * config.execution.device_iterations
    return Needs("finetuning", config, traced, traced.plan(), count, state, samples, moments)


def inference_needs(config: RunConfig, platform: str = "cpu") -> Needs:
    """What generation needs, traced for a platform."""
    config = replace(config, model=replace(config.model, eval=True))
    family = family_of(config)
    program = build_generation(_on(platform, config), family.generator, strategy_of(config))
    execution, count = config.execution, _parameters(family.weights(config))
    samples = execution.device_iterations * execution.data_parallel * execution.micro_batch_size
    traced = popxl.plan.trace(program.ir, platform)
    state = count * _itemsize(config)
    return Needs("inference", config, traced, traced.plan(), count, state, samples)


def _on(platform: str, config: RunConfig) -> RunConfig:
    """The configuration as it runs on a platform that need not be here."""
    execution = config.execution
    if execution.device != "auto":
        return config
    return replace(config, execution=replace(execution, device=cast(Device, platform)))


def _parameters(table: WeightTable) -> int:
    return sum(math.prod(weight.shape) for weight in table.weights)


def _itemsize(config: RunConfig) -> int:
    return popxl.dtype.from_name(config.model.precision).itemsize
