"""Number of groups into which a layer's experts are split, so that each group fits a device."""

from __future__ import annotations

from config.sections import RunConfig

BYTES_PER_WEIGHT = 16
"""Device bytes per weight of the active group at most: weight, gradient and two moments in float32,
or in 16 bits together with those of the group that is loaded next."""

MEMORY_SHARE = 1 / 4
"""Fraction of a device's memory that a group may take."""


def active_expert_bytes(config: RunConfig) -> float:
    """Estimate the device bytes that one group of a layer's experts takes while it trains."""
    e = config.execution
    return BYTES_PER_WEIGHT * config.num_expert_weights() / e.tensor_parallel / e.expert_groups


def min_expert_groups(config: RunConfig, memory: float) -> int:
    """Return the smallest number of expert groups with which a group fits its share of `memory`.

    It is 1 for models whose experts cannot be streamed.
    """
    if not config.can_group_experts:
        return 1
    total = active_expert_bytes(config) * config.execution.expert_groups
    required = total / (MEMORY_SHARE * memory)
    experts = config.num_experts
    return next(n for n in range(1, experts + 1)
                if experts % n == 0 and n >= min(required, experts))  # fmt: skip


def next_expert_group_count(config: RunConfig) -> int | None:
    """Return the next number of expert groups to try, at least doubled; None at the maximum."""
    groups = config.execution.expert_groups
    if not config.can_group_experts:
        return None
    return next(
        (n for n in range(2 * groups, config.num_experts + 1) if config.num_experts % n == 0), None
    )
