"""Optimizers: Adam(W), 8-bit Adam and Adafactor, with their quantized or sharded state."""

from popxl_addons.optimizers.adafactor import AdafactorOptimizerStep as AdafactorOptimizerStep
from popxl_addons.optimizers.adam import AdamOptimizerStep as AdamOptimizerStep
from popxl_addons.optimizers.adam_8bit import Adam8bitOptimizerStep as Adam8bitOptimizerStep
