"""Advice of a plan beyond the question: settings that pay."""

from __future__ import annotations

from planning.compact_state import with_compact_state
from planning.larger_batches import with_larger_batch
from planning.report import Report
from planning.variants import Programs


def advised(made: Report, programs: Programs, is_told: bool = False) -> Report:
    """A plan that names settings with which training is clearly faster; arguments as for
    `with_larger_batch`."""
    return with_compact_state(with_larger_batch(made, programs, is_told), programs)
