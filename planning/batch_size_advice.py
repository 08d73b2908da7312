"""Advice on the batch size of a plan: a larger one if it does not keep several devices busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from config.config_sources import BATCH
from config.sections import RunConfig
from planning.hardware.machines import Machine
from planning.parallel_layouts import list_layouts, select_promising_layouts
from planning.placement_search import (
    PlacementSearch,
    first_variant,
    search_placement,
    simulate_trial,
)
from planning.program_variants import VariantCache
from planning.report import LargerBatchAdvice, PlanReport
from planning.requirements import tokens_per_sample

FACTORS = 4, 16
"""Factors of the plan's batch size to try."""

MIN_GAIN = 1.25
"""Smallest speedup for which a larger batch is advised."""

MIN_FRACTION = 0.8
"""Fraction of the fastest batch's samples per second that the advised batch achieves."""

TARGET_TOKENS = 2**14
"""Tokens of a micro-batch per tensor-parallel device: larger ones are no faster."""


def with_batch_advice(
    report: PlanReport, programs: VariantCache, has_explicit_layout: bool = False
) -> PlanReport:
    """Return a copy of a plan that advises the smallest batch size to keep the devices busy.

    Args:
        has_explicit_layout: the user set the layout, so larger batches keep it.
    """
    config, machine = report.requirements.config, report.machine
    if report.requirements.placement_result is None or config.num_replicas == 1 or not report.fits:
        return report
    first = simulate_trial(programs.variants(config, machine.target), config, machine)
    layouts, rates, factor = {1: config}, {1: 1 / first.seconds}, 1
    for larger in FACTORS:
        configs = _list_larger(config, larger, has_explicit_layout)
        limit = MIN_FRACTION * larger / rates[factor]
        if all(_least_seconds(c, machine, programs) > limit for c in configs):
            continue  # micro-batches of the same size compute, or are dispatched, all the time
        fastest = select_promising_layouts(configs, machine, programs)[0]
        if not fastest.fits:
            break
        layouts[larger], rates[larger] = fastest.config, larger / fastest.seconds
        factor = next(n for n, rate in rates.items() if rate >= MIN_FRACTION * max(rates.values()))
    if factor == 1:
        return report
    advised = layouts[factor]
    best = search_placement(programs.variants(advised, machine.target), advised, machine).best
    gain = factor * report.expected_seconds / best.seconds
    batch = advised.training.global_batch_size
    return (
        report if gain < MIN_GAIN else replace(report, larger_batch=LargerBatchAdvice(batch, gain))
    )


def _list_larger(config: RunConfig, factor: int, has_explicit_layout: bool) -> Sequence[RunConfig]:
    """Return the layouts of a batch larger by `factor` that can be faster than the plan's.

    What tensor parallelism takes grows with the batch, what data parallelism takes does not.
    """
    larger = config.with_values({BATCH: factor * config.training.global_batch_size})
    micro = None if has_explicit_layout else max(TARGET_TOKENS // tokens_per_sample(config), 1)
    layouts = list_layouts(larger, config.num_replicas, micro)
    if has_explicit_layout:
        return [c for c in layouts if c.execution == config.execution]
    tp = config.execution.tensor_parallel
    return [c for c in layouts if c.execution.tensor_parallel <= tp]


def _least_seconds(config: RunConfig, machine: Machine, programs: VariantCache) -> float:
    """Return a lower bound of a step that recomputes its activations."""
    search = PlacementSearch.for_machine(machine, programs.variants(config, machine.target), config)
    return search.busy_seconds(first_variant(config))
