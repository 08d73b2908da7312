"""Advice to take another micro-batch: with the same batch it makes the step faster, or fit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import takewhile
from math import inf

from config.config_sources import MICRO, largest_divisor
from config.errors import ConfigError
from config.sections import RunConfig
from planning.placement_search import simulate_fastest_trial
from planning.program_variants import MIN_GAIN, ProgramVariant, VariantCache
from planning.report import FasterSetting, PlanReport


def find_faster_micro_batch(report: PlanReport, programs: VariantCache) -> FasterSetting | None:
    """Return the micro-batch with a faster step than a plan's, if there is one; else None.

    It is larger if twice the size is faster, or else smaller if that is; of a plan that does not
    fit, it is halved until it does. Only the variant that the plan chose is simulated: the best one
    can be faster.
    """
    config, result = report.requirements.config, report.requirements.placement_result
    if result is None or config.execution.disk is not None:
        return None
    if not report.fits:
        return _find_fitting(report, programs)
    return _find_larger(report, programs, result.best.seconds) or _find_smaller(
        report, programs, result.best.seconds
    )


def _find_larger(
    report: PlanReport, programs: VariantCache, seconds: float
) -> FasterSetting | None:
    """Return twice a plan's micro-batch, or a larger one; None if that is not faster.

    Args:
        seconds: the plan's.
    """
    config = report.requirements.config
    size, count = config.execution.micro_batch_size, config.gradient_accumulation
    if count % 2:
        return None
    doubled = _simulate_size(report, programs, 2 * size, (1 - MIN_GAIN) * seconds)
    if doubled is None:
        return None
    # What a micro-batch takes besides its samples halves each time that the size is doubled.
    spent, gains = doubled.seconds, seconds - doubled.seconds
    factors = list[int]()
    for factor in takewhile(lambda n: count % n == 0, (4 * 2**i for i in itertools.count())):
        gains /= 2
        if gains < MIN_GAIN * spent:
            break
        factors.append(factor)
        spent -= gains
    limit = (1 - MIN_GAIN) * doubled.seconds
    larger = (_simulate_size(report, programs, n * size, limit) for n in reversed(factors))
    return next((faster for faster in larger if faster is not None), doubled)


def _find_smaller(
    report: PlanReport, programs: VariantCache, seconds: float
) -> FasterSetting | None:
    """Return a part of a plan's micro-batch, halved while that is faster; None if it is not.

    Args:
        seconds: the plan's.
    """
    found, size = None, _half(report.requirements.config.execution.micro_batch_size)
    while size is not None:
        faster = _simulate_size(report, programs, size, (1 - MIN_GAIN) * seconds)
        if faster is None:
            break
        found, seconds, size = faster, faster.seconds, _half(size)
    return found


def _find_fitting(report: PlanReport, programs: VariantCache) -> FasterSetting | None:
    """Return the largest micro-batch with which a plan fits that is too large for the device."""
    config = report.requirements.config
    needed, available = report.memory_use.get("device memory", (0.0, 0.0))
    size = _half(config.execution.micro_batch_size) if needed > available else None
    while size is not None:
        fitting = _simulate_size(report, programs, size, inf)
        if fitting is not None:
            return fitting
        size = _half(size)
    return None


def _half(size: int) -> int | None:
    """Return the largest part of a micro-batch up to its half; None for a single sample."""
    return None if size == 1 else largest_divisor(size, size // 2)


def _simulate_size(
    report: PlanReport, programs: VariantCache, size: int, limit: float
) -> FasterSetting | None:
    """Simulate a step with another micro-batch; None if it is no faster than `limit`."""
    try:
        config = report.requirements.config.with_values({MICRO: size})
    except ConfigError:  # the passes need more micro-batches
        return None
    machine, result = report.machine, report.requirements.placement_result
    assert result is not None, "the plan was searched"
    variants = programs.variants(config, machine.target, result.best.program)
    candidates = [_scale_variant(report, config)]
    best = simulate_fastest_trial(variants, config, machine, candidates, limit)
    return FasterSetting(MICRO, size, best.seconds) if best is not None and best.fits else None


def _scale_variant(report: PlanReport, config: RunConfig) -> ProgramVariant:
    """Return the variant of another micro-batch that is like the plan's best one."""
    result, before = report.requirements.placement_result, report.requirements.config
    assert result is not None, "the plan was searched"
    per_pass, count = result.best.variant.per_pass, config.gradient_accumulation
    if config.micro_batches_per_pass != "auto":
        scaled = config.micro_batches_per_pass
    elif per_pass == before.gradient_accumulation:
        scaled = count
    elif per_pass == 1:
        scaled = 1
    else:  # as many samples in a pass
        samples = per_pass * before.execution.micro_batch_size
        scaled = largest_divisor(count, max(samples // config.execution.micro_batch_size, 1))
    return replace(result.best.variant, per_pass=scaled)
