"""Simulated times of the programs for samples that are shorter than the maximum length."""

from __future__ import annotations

import popxl
from config.length_buckets import bucket_configs
from planning.hardware.machines import Machine
from planning.program_variants import VariantCache
from planning.requirements import Requirements
from planning.roofline import bound_seconds


def simulate_buckets(requirements: Requirements, machine: Machine) -> dict[int, float]:
    """Returns the simulated seconds of a run for each shorter sample length.

    They are simulated as that of the longest is; its memory is that of the run.
    """
    if requirements.kind != "finetuning" or requirements.variants is None:
        return {}
    config, seconds = requirements.config, dict[int, float]()
    variant = requirements.variants.variant_of(requirements.traced)
    rates = machine.achieved_rates(config.model.precision, requirements.plan.replicas)
    for shorter in bucket_configs(config):
        _, traced = VariantCache().variants(shorter, machine.target).get_program(variant)
        traced.ir.place_like(requirements.traced.ir)
        seconds[shorter.model.sequence_length] = _run_seconds(traced, machine, rates)
    return seconds


def _run_seconds(
    traced: popxl.plan.TracedProgram, machine: Machine, rates: popxl.plan.Rates
) -> float:
    plan = traced.plan()
    if machine.platform != "cpu" or plan.disk:
        return traced.timeline(rates).seconds
    return bound_seconds(plan.parts, rates)
