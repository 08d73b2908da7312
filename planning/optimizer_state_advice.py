"""Advice to keep AdamW state in 8 bits: it makes the step faster, or only it fits memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from config.errors import ConfigError
from planning.placement_search import simulate_fastest_trial
from planning.program_variants import (
    PlacementTrial,
    ProgramVariant,
    VariantCache,
    layer_types_faster_saved,
)
from planning.report import FasterSetting, PlanReport

FIELD, STATE = "training.optimizer.state", "8bit_residual8"

MIN_GAIN = 0.05
"""Smallest fraction of a step's time for whose gain the state is advised."""

MIN_SHARE = 0.1
"""Smallest fraction of the model's state that moments take for the advice to pay."""


def find_faster_state(report: PlanReport, programs: VariantCache) -> FasterSetting | None:
    """Return the 8-bit optimizer state if that makes a plan faster or fit; else None.

    Only a few variants of the program are simulated: the best one can be faster still.
    """
    requirements, machine = report.requirements, report.machine
    config, result = requirements.config, requirements.placement_result
    optimizer = config.training.optimizer
    if result is None or (optimizer.name, optimizer.state) != ("adamw", "float32"):
        return None
    if result.best.is_bound_by_compute or requirements.moments < MIN_SHARE * requirements.state:
        return None
    try:  # the state replaces stochastic rounding, as on the command line
        other = config.with_values({FIELD: STATE, "training.stochastic_rounding": None})
    except ConfigError:
        return None
    variants = programs.variants(other, machine.target, result.best.program)
    candidates = list(_candidate_variants(result.best, report))
    best = simulate_fastest_trial(variants, other, machine, candidates)
    if best is None or not best.fits or best.seconds > report.seconds_to_beat(MIN_GAIN):
        return None
    return FasterSetting(FIELD, STATE, best.seconds)


def _candidate_variants(best: PlacementTrial, report: PlanReport) -> Iterator[ProgramVariant]:
    """Iterate over program variants to simulate: the plan's, and those that save activations.

    Saved activations use the device memory that the 8-bit state frees.
    """
    yield best.variant
    config = report.requirements.config
    if config.execution.activations != "auto":
        return
    saved = frozenset((kind, 1.0) for kind in layer_types_faster_saved(best.program, best.traced))
    yield replace(best.variant, saved_layers=saved)
    for n in (1, 2) if config.micro_batches_per_pass == "auto" else ():
        if config.gradient_accumulation % n == 0:
            yield replace(best.variant, per_pass=n, saved_layers=saved)
