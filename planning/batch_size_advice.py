"""Whether a batch is too small to keep several devices busy."""

from __future__ import annotations

from dataclasses import replace

from config.layers import BATCH
from planning.parallel_layouts import ParallelLayout, list_layouts, promising_layouts
from planning.placement_search import run_trial, search_placement
from planning.program_variants import VariantCache
from planning.report import LargerBatch, Report
from planning.requirements import tokens_per_sample

TIMES = 4, 16
"""Batches to try, in those of the plan."""

MIN_GAIN = 1.25
"""Times the samples a second for which a larger batch is named."""

ENOUGH = 0.8
"""Of the samples a second of the fastest batch, by first simulated steps: the smallest batch that
reaches them is named."""

TOKENS_AT_ONCE = 2**14
"""Of a micro-batch, for each tensor-parallel device: larger ones are no faster."""


def with_batch_advice(made: Report, programs: VariantCache, is_told: bool = False) -> Report:
    """A plan that names a batch which feeds its devices, if its own is too small.

    Args:
        is_told: the layout is not the plan's choice, and stays for larger batches.
    """
    config, on = made.requirements.config, made.machine
    if made.requirements.chosen is None or config.replicas == 1 or not made.fits:
        return made
    first = run_trial(programs.variants(config, on.target), config, on)
    found = [ParallelLayout(config, first.seconds, first.fits)]
    for times in TIMES:
        larger = config.changed({BATCH: times * config.training.global_batch_size})
        micro = None if is_told else max(TOKENS_AT_ONCE // tokens_per_sample(config), 1)
        ways = list_layouts(larger, config.replicas, micro)
        ways = [way for way in ways if not is_told or way.execution == config.execution]
        fastest = promising_layouts(ways, on, programs)[0]
        if not fastest.fits:
            break
        found.append(fastest)
    rates = [layout.config.training.global_batch_size / layout.seconds for layout in found]
    enough = next(n for n, rate in enumerate(rates) if rate >= ENOUGH * max(rates))
    if not enough:
        return made
    best = search_placement(
        programs.variants(found[enough].config, on.target), found[enough].config, on
    ).best
    gain = TIMES[enough - 1] * made.expected_seconds / best.seconds
    batch = found[enough].config.training.global_batch_size
    return made if gain < MIN_GAIN else replace(made, larger_batch=LargerBatch(batch, gain))
