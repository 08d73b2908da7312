"""Advice on the dtype of stored gradients: float32 where it is faster, bfloat16 where it fits."""

from __future__ import annotations

from planning.placement_search import simulate_fastest_trial
from planning.program_variants import MIN_GAIN, VariantCache
from planning.report import FasterSetting, PlanReport

FIELD = "training.gradient_dtype"


def find_faster_gradient_dtype(report: PlanReport, programs: VariantCache) -> FasterSetting | None:
    """Return the other dtype of stored gradients if it makes a plan faster or fit; else None.

    bfloat16 is rounded once a pass, which takes time; float32 is advised where it is faster, and
    bfloat16 only where float32 does not fit.
    """
    config, result = report.requirements.config, report.requirements.placement_result
    if result is None or config.execution.disk is not None:
        return None
    is_float32 = config.training.gradient_dtype == "float32"
    if is_float32 and report.fits:
        return None
    dtype, machine = "bfloat16" if is_float32 else "float32", report.machine
    other, limit = config.with_values({FIELD: dtype}), report.seconds_to_beat(MIN_GAIN)
    variants = programs.variants(other, machine.target, result.best.program)
    best = simulate_fastest_trial(variants, other, machine, [result.best.variant], limit)
    if best is None or not best.fits:
        return None
    return FasterSetting(FIELD, dtype, best.seconds)
