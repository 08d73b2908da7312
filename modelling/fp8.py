"""FP8 recipes (how operands are scaled) of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import popxl_addons as addons
from config.sections import RunConfig

if TYPE_CHECKING:
    from popxl_addons.fp8 import Recipe


def make_fp8_recipe(config: RunConfig) -> Recipe | None:
    """Returns the FP8 scaling recipe of a configuration; None if it does not use FP8."""
    fp8 = config.fp8
    if not fp8.enabled:
        return None
    from popxl.ops.fp8_e4m3_e5m2 import ScaleRule

    rule = ScaleRule(fp8.margin, fp8.power_of_2_scales)
    if fp8.recipe == "current":
        return addons.CurrentScaling(fp8.format, rule)
    return addons.DelayedScaling(
        fp8.format, rule, fp8.amax_history_len, fp8.amax_compute_algo, fp8.interval
    )
