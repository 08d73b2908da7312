"""Optimizers."""

from popxl_addons.optimizers.adam import AdamOptimizerStep as AdamOptimizerStep
