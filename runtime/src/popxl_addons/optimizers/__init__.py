"""Optimizers: Adam(W), 8-bit Adam and Adafactor, with their quantized or sharded state."""

from typing import TYPE_CHECKING

from popxl.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from popxl_addons.optimizers.adafactor import AdafactorOptimizerStep as AdafactorOptimizerStep
    from popxl_addons.optimizers.adam import AdamOptimizerStep as AdamOptimizerStep
    from popxl_addons.optimizers.adam_8bit import Adam8bitOptimizerStep as Adam8bitOptimizerStep
else:
    lazy_exports(__name__)
