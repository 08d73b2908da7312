"""Choice of a float8 scale."""

from popxl_addons.ops.fp8_mse_scale.fp8_mse_scale import fp8_mse_scale as fp8_mse_scale
