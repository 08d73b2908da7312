"""Float8 scale with a small mean squared error."""

from popxl_addons.ops.fp8_mse_scale.fp8_mse_scale import fp8_mse_scale as fp8_mse_scale
