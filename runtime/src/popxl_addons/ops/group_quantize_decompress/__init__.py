"""Group quantization of weights to 4 or 8 bits."""

from popxl_addons.ops.group_quantize_decompress.group_quantize_decompress import (
    group_quantize_compress_numpy as group_quantize_compress_numpy,
)
from popxl_addons.ops.group_quantize_decompress.group_quantize_decompress import (
    group_quantize_decompress as group_quantize_decompress,
)
from popxl_addons.ops.group_quantize_decompress.group_quantize_decompress import (
    group_quantize_decompress_numpy as group_quantize_decompress_numpy,
)
