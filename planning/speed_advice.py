"""Advice in a plan: settings with which training would be clearly faster."""

from __future__ import annotations

from dataclasses import replace

from planning.batch_size_advice import with_batch_advice
from planning.gradient_dtype_advice import find_faster_gradient_dtype
from planning.micro_batch_advice import find_faster_micro_batch
from planning.optimizer_state_advice import find_faster_state
from planning.program_variants import VariantCache
from planning.report import PlanReport

_FINDERS = find_faster_micro_batch, find_faster_gradient_dtype, find_faster_state


def with_speed_advice(
    report: PlanReport, programs: VariantCache, has_explicit_layout: bool = False
) -> PlanReport:
    """Return a copy of a plan with advice on batch size and on settings that make it faster.

    Arguments as for `with_batch_advice`.
    """
    report = with_batch_advice(report, programs, has_explicit_layout)
    found = [find(report, programs) for find in _FINDERS]
    return replace(report, faster_settings=[setting for setting in found if setting is not None])
