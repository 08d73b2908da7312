"""Advantages against TRL's own lines, and on groups that teach nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trl.trainer.utils import nanstd

from data.advantages import (
    assign_group_ids,
    group_relative_advantages,
    group_stds,
    leave_one_out_advantages,
)

GENERATIONS = 4
REWARDS = np.random.default_rng(3).normal(size=24)
REWARDS[[1, 5, 6, 7]] = np.nan  # the second group has one reward alone
REWARDS[8:12] = 0.5
GROUPS = np.repeat(np.arange(6), GENERATIONS)


def trl_group_relative(rewards: torch.Tensor, scale: str) -> torch.Tensor:
    grouped = rewards.view(-1, GENERATIONS)
    advantages = rewards - torch.nanmean(grouped, dim=1).repeat_interleave(GENERATIONS)
    if scale == "group":
        advantages /= nanstd(grouped, dim=1).repeat_interleave(GENERATIONS) + 1e-4
    elif scale == "batch":
        advantages /= nanstd(rewards) + 1e-4
    return torch.nan_to_num(advantages, nan=0.0)


def trl_leave_one_out(rewards: torch.Tensor, scale: str) -> torch.Tensor:
    grouped = rewards.view(-1, GENERATIONS)
    counts = (~torch.isnan(grouped)).sum(dim=1, keepdim=True)
    baselines = (torch.nansum(grouped, dim=1, keepdim=True) - grouped) / (counts - 1)
    advantages = rewards - baselines.view(-1)
    if scale == "batch":
        advantages = (advantages - torch.nanmean(advantages)) / (nanstd(advantages) + 1e-4)
    return torch.nan_to_num(advantages, nan=0.0)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_they_are_those_of_trl(scale: str, shuffled: bool) -> None:
    """Whatever the order of the rows."""
    order = np.random.default_rng(1).permutation(24) if shuffled else np.arange(24)
    theirs = {group_relative_advantages: trl_group_relative}
    if scale != "group":
        theirs[leave_one_out_advantages] = trl_leave_one_out
    for ours, trl in theirs.items():
        expected = trl(torch.tensor(REWARDS), scale).numpy()[order]
        found = ours(REWARDS[order], GROUPS[order], scale)
        # torch divides the counts in float32.
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-12)
        assert not found[np.isnan(REWARDS[order])].any()


def test_groups_of_one_or_of_equal_rewards_teach_nothing() -> None:
    rewards, groups = np.asarray([3.0, 1.0, 1.0, np.nan]), np.asarray([0, 1, 1, 2])
    for scale in ("group", "none"):
        assert not group_relative_advantages(rewards, groups, scale).any()
    assert not leave_one_out_advantages(rewards, groups).any()
    np.testing.assert_array_equal(group_stds(rewards, groups), [np.nan, 0, np.nan])
    assert not group_relative_advantages(np.full(2, np.nan), np.zeros(2, np.int64), "batch").any()
    assert not leave_one_out_advantages(np.full(2, np.nan), np.zeros(2, np.int64), "batch").any()


def test_groups_are_numbered_in_the_order_of_their_keys() -> None:
    np.testing.assert_array_equal(assign_group_ids(["b", "a", "b"]), [0, 1, 0])
