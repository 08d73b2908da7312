"""FP8 recipes (how operands are scaled) of a configuration."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
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


def fp8_layer_context(config: RunConfig) -> AbstractContextManager[None]:
    """Returns a context manager in which new linear layers multiply by the run's FP8 recipe."""
    return addons.fp8_autocast(make_fp8_recipe(config)) if config.fp8.enabled else nullcontext()


def fp8_head_context(config: RunConfig) -> AbstractContextManager[None]:
    """Returns a context manager in which a new LM head multiplies in FP8 if `fp8.head` is set."""
    ordinary = config.fp8.enabled and not config.fp8.head
    return addons.fp8_autocast(None) if ordinary else nullcontext()
