"""Advantages of rollouts: rewards compared with those of the same group.

A group is the completions of one prompt. NaN marks a completion without a reward; it does not count
in its group, and its advantage is 0.
"""

from __future__ import annotations

import numpy as np

STD_EPSILON = 1e-4
"""Added to standard deviations, as in TRL."""


def group_relative_advantages(
    rewards: np.ndarray, groups: np.ndarray, scale: str = "group"
) -> np.ndarray:
    """Returns GRPO's advantages, float64 [n]: rewards minus the mean of their group.

    Args:
        rewards: float [n].
        groups: number of each completion's group from 0, int [n].
        scale: "group": divided by the standard deviation of the group's rewards; "batch": of all
            rewards; "none": not divided.
    """
    advantages = rewards - _group_means(rewards, groups)[groups]
    if scale == "group":
        advantages = advantages / (group_stds(rewards, groups)[groups] + STD_EPSILON)
    elif scale == "batch":
        advantages = advantages / (_std(rewards) + STD_EPSILON)
    return np.nan_to_num(advantages, nan=0.0)


def leave_one_out_advantages(
    rewards: np.ndarray, groups: np.ndarray, scale: str = "none"
) -> np.ndarray:
    """Returns RLOO's advantages, float64 [n]: rewards minus the mean of the others in the group.

    Args:
        rewards, groups: as for `group_relative_advantages`.
        scale: "batch": normalized to mean 0 and standard deviation 1; "none": not.
    """
    sums, counts = _group_sums(rewards, groups)
    with np.errstate(invalid="ignore", divide="ignore"):
        advantages = rewards - (sums[groups] - rewards) / (counts[groups] - 1)
    if scale == "batch":
        mean = np.nanmean(advantages) if not np.isnan(advantages).all() else 0.0
        advantages = (advantages - mean) / (_std(advantages) + STD_EPSILON)
    return np.nan_to_num(advantages, nan=0.0)


def group_stds(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Returns the unbiased standard deviation of each group's rewards; NaN below two rewards."""
    differences = rewards - _group_means(rewards, groups)[groups]
    squares, counts = _group_sums(differences**2, groups)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 1, np.sqrt(squares / (counts - 1)), np.nan)


def assign_group_ids(keys: list[str]) -> np.ndarray:
    """Numbers the distinct keys; returns the number of each key: int64 [n]."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.asarray([numbers[key] for key in keys], np.int64)


def _group_sums(values: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums and counts of each group's values, without NaN."""
    is_number, size = ~np.isnan(values), int(groups.max(initial=-1)) + 1
    sums = np.bincount(groups, np.where(is_number, values, 0.0), size)
    return sums, np.bincount(groups, is_number.astype(np.float64), size)


def _group_means(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    sums, counts = _group_sums(values, groups)
    return sums / np.maximum(counts, 1)


def _std(values: np.ndarray) -> float:
    """Unbiased standard deviation without NaN; NaN below two values."""
    numbers = values[~np.isnan(values)]
    return float(np.std(numbers, ddof=1)) if len(numbers) > 1 else np.nan
