"""Convolutions, with torch's as the reference."""

from __future__ import annotations

import torch.nn.functional as F

from popxl import ops
from tests.popxl.ops.harness import OpRecord, rand

X, W = rand(2, 4, 7, 6), rand(6, 4, 3, 2)
GROUPED = rand(6, 2, 3, 3)
BACK, BACK_GROUPED = rand(4, 3, 3, 2), rand(4, 3, 3, 3)
MANY = "sums of up to 36 products, and of all positions in the gradient of the weight"


def _conv(name, build, reference, inputs=(X, W), dtypes=("float32",)):
    return OpRecord(name, build, list(inputs), reference, dtypes, tolerance=2, why=MANY)


def _padded(left, right, top, bottom):
    return lambda x, w: F.conv2d(F.pad(x, (left, right, top, bottom)), w)


RECORDS = [
    _conv("conv", ops.conv, F.conv2d, dtypes=("float32", "float16")),
    _conv("conv_stride", lambda x, w: ops.conv(x, w, (2, 1), (1, 0, 1, 0)),
          lambda x, w: F.conv2d(x, w, stride=(2, 1), padding=(1, 0))),
    _conv("conv_uneven_padding", lambda x, w: ops.conv(x, w, padding=(1, 2, 0, 3)),
          _padded(2, 3, 1, 0)),
    _conv("conv_dilation", lambda x, w: ops.conv(x, w, dilation=(2, 3)),
          lambda x, w: F.conv2d(x, w, dilation=(2, 3))),
    _conv("conv_groups", lambda x, w: ops.conv(x, w, groups=2),
          lambda x, w: F.conv2d(x, w, groups=2), (X, GROUPED)),
    _conv("conv_valid", lambda x, w: ops.conv(x, w, padding=(9, 9, 9, 9), pad_type="valid"),
          F.conv2d),
    _conv("conv_same_upper", lambda x, w: ops.conv(x, w, pad_type="same_upper"),
          _padded(0, 1, 1, 1)),
    _conv("conv_same_lower", lambda x, w: ops.conv(x, w, pad_type="same_lower"),
          _padded(1, 0, 1, 1)),
    _conv("conv_hints", lambda x, w: ops.conv(x, w, available_memory_proportions=[0.2],
          partials_types=["half"]), F.conv2d),
    _conv("conv_1d", lambda x, w: ops.conv(x, w, (2,), (1, 1), (1,)),
          lambda x, w: F.conv1d(x, w, stride=2, padding=1), (rand(2, 3, 8), rand(4, 3, 3))),
    _conv("conv_3d", ops.conv, F.conv3d, (rand(1, 2, 4, 4, 4), rand(3, 2, 2, 2, 2))),
    _conv("conv_transpose", ops.conv_transpose, F.conv_transpose2d, (X, BACK),
          ("float32", "float16")),
    _conv("conv_transpose_all",
          lambda x, w: ops.conv_transpose(x, w, (3, 2), (1, 0, 1, 0), (1, 2), 2, "not_set", (1, 0)),
          lambda x, w: F.conv_transpose2d(x, w, None, (3, 2), (1, 0), (1, 0), 2, (1, 2)),
          (X, BACK_GROUPED)),
    _conv("conv_transpose_shape",
          lambda x, w: ops.conv_transpose(x, w, (2, 2), output_shape=(13, 12)),
          lambda x, w: F.conv_transpose2d(x, w, stride=2)[:, :, 1:14, 0:12], (X, BACK)),
    _conv("conv_transpose_same",
          lambda x, w: ops.conv_transpose(x, w, (2, 2), pad_type="same_upper"),
          lambda x, w: F.conv_transpose2d(x, w, stride=2)[:, :, 0:14, 0:12], (X, BACK)),
]  # fmt: skip
