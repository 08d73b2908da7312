"""Inference in float8: weights cast on the host, activations on the device."""

from __future__ import annotations

import numpy as np

import popxl
from popxl import ops
from popxl.fp8_utils import host_fp8_mse_scale, host_pow2scale_cast_to_fp8


def linear_fp8(x: np.ndarray, w: np.ndarray, x_scale: int, in_host: bool = False):
    """x @ w, with both rounded to float8 after a scaling by a power of two.

    Args:
        x: float32 (rows, features), cast on the device, or on the host with `in_host`.
        w: float32 (features, outputs), cast on the host with the best scale for it.
        x_scale: log2 of the factor for `x`.

    Returns:
        The product in float16, and the float8 weight as it is stored (one byte each).
    """
    _, w_scale = host_fp8_mse_scale(w, popxl.float8_143)
    ir = popxl.Ir()
    with ir.main_graph:
        w8 = popxl.variable(w, popxl.float8_143, name="w", log2_scale=w_scale)
        if in_host:
            stream = popxl.h2d_stream(x.shape, popxl.float8_143, name="x")
            x8 = ops.host_load(stream)
            data = host_pow2scale_cast_to_fp8(x, popxl.float8_143, x_scale)
        else:
            stream = popxl.h2d_stream(x.shape, popxl.float32, name="x")
            x8 = ops.pow2scale_cast_to_fp8(
                ops.host_load(stream), popxl.constant(x_scale), popxl.float8_143
            )
            data = x
        # The product undoes both scales.
        y = ops.matmul_pow2scaled(x8, w8, log2_scale=popxl.constant(-(x_scale + w_scale)))
        y_stream = popxl.d2h_stream(y.shape, y.dtype, name="y")
        ops.host_store(y_stream, y)
    with popxl.Session(ir, "ipu_model") as session:
        outputs = session.run({stream: data})
        return outputs[y_stream], session.get_tensor_data(w8)


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(4, 32)).astype(np.float32), rng.normal(size=(32, 3)).astype(np.float32)
    print("error", np.abs(linear_fp8(x, w, 2)[0] - x @ w).max())
