"""Into how many groups a layer's experts are cut, so that a device holds what one of them takes."""

from __future__ import annotations

from config.sections import RunConfig

BYTES = 16
"""That a weight of the group at work takes at most: it, its gradient and two moments in float32, or
in 16 bits besides those of the group that is loaded next."""

SHARE = 1 / 4
"""Of a device's memory that a group may take, as what a micro-batch takes."""


def active_bytes(config: RunConfig) -> float:
    """About what a group of a layer's experts takes of a device's memory in training."""
    e = config.execution
    return BYTES * config.expert_weights() / e.tensor_parallel / e.expert_groups


def min_groups(config: RunConfig, memory: float) -> int:
    """The fewest groups of which one takes its share of `memory`; those of one expert if none does.

    Where nothing of the experts can be cut, they are one.
    """
    if not config.cuts_experts:
        return 1
    whole = active_bytes(config) * config.execution.expert_groups
    least = whole / (SHARE * memory)
    return next(n for n in range(1, config.experts + 1)
                if config.experts % n == 0 and n >= min(least, config.experts))  # fmt: skip


def next_groups(config: RunConfig) -> int | None:
    """At least twice as many groups; None: they cannot be cut further."""
    groups = config.execution.expert_groups
    if not config.cuts_experts:
        return None
    return next((n for n in range(2 * groups, config.experts + 1) if config.experts % n == 0), None)
