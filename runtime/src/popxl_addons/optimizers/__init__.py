"""Optimizers."""

from popxl_addons.optimizers.adafactor import AdafactorOptimizerStep as AdafactorOptimizerStep
from popxl_addons.optimizers.adam import AdamOptimizerStep as AdamOptimizerStep
from popxl_addons.optimizers.adam_8bit import Adam8bitOptimizerStep as Adam8bitOptimizerStep
