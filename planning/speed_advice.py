"""Advice in a plan: settings with which training would be clearly faster."""

from __future__ import annotations

from planning.batch_size_advice import with_batch_advice
from planning.optimizer_state_advice import with_state_advice
from planning.program_variants import VariantCache
from planning.report import PlanReport


def with_speed_advice(
    report: PlanReport, programs: VariantCache, has_explicit_layout: bool = False
) -> PlanReport:
    """Return a copy of a plan with advice on batch size and optimizer state.

    Arguments as for `with_batch_advice`.
    """
    return with_state_advice(with_batch_advice(report, programs, has_explicit_layout), programs)
