"""Resizing of images and regions, as a linear map along each axis in turn.

Both ops are separable: along each axis, an output element is a weighted sum of input elements.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from popxl._ir.op_registry import define
from popxl.ops._emit import emit
from popxl.ops._index_bounds import check_constant_indices, clamp_indices
from popxl.ops._numerics import float_op, matmul_precision
from popxl.ops.gathering import check_indices
from popxl.tensor import Tensor

InterpolateType = Literal["nearest", "linear", "cubic"]
InterpolateNearestType = Literal["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
InterpolateCoordinateTransformationType = Literal[
    "half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_half_pixel_for_nn"
]


# ---- interpolate --------------------------------------------------------------------------------
def _source_coordinates(size: int, out: int, scale: float, mode: str) -> np.ndarray:
    """Returns the input coordinate of each output element (ONNX's Resize)."""
    x = np.arange(out, dtype=np.float64)
    if mode == "align_corners":
        return x * (size - 1) / (out - 1) if out > 1 else x
    if mode == "asymmetric":
        return x / scale
    if mode == "tf_half_pixel_for_nn":
        return (x + 0.5) / scale
    if mode == "pytorch_half_pixel" and out == 1:
        return x
    return (x + 0.5) / scale - 0.5


def _round_to_nearest(x: np.ndarray, mode: str) -> np.ndarray:
    if mode == "floor":
        return np.floor(x)
    if mode == "ceil":
        return np.ceil(x)
    return np.ceil(x - 0.5) if mode == "round_prefer_floor" else np.floor(x + 0.5)


def _cubic_weights(distance: np.ndarray, a: float = -0.75) -> np.ndarray:
    """Returns the weights of cubic convolution (Keys, 1981) at given distances."""
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def _resize_matrix(
    size: int, scale: float, mode: str, nearest_mode: str, transformation: str
) -> np.ndarray:
    """Returns one axis's resize matrix (out, size); outside counts as the input's border value."""
    out = math.floor(size * scale)
    x = _source_coordinates(size, out, scale, transformation)
    if mode == "nearest":
        taps = [(_round_to_nearest(x, nearest_mode), np.ones(out))]
    elif mode == "linear":
        x = np.clip(x, 0, size - 1)
        low = np.floor(x)
        taps = [(low, 1 - (x - low)), (low + 1, x - low)]
    else:
        low = np.floor(x)
        taps = [(low + k, _cubic_weights(x - low - k)) for k in (-1, 0, 1, 2)]
    matrix = np.zeros((out, size))
    for index, weight in taps:
        np.add.at(matrix, (np.arange(out), np.clip(index, 0, size - 1).astype(int)), weight)
    return matrix


def _interpolate(
    x: Any, scales: tuple[float, ...], mode: str, nearest_mode: str, transformation: str
) -> Any:
    for axis, scale in enumerate(scales):
        if scale == 1.0:
            continue
        matrix = _resize_matrix(x.shape[axis], scale, mode, nearest_mode, transformation)
        moved = jnp.matmul(
            jnp.moveaxis(x, axis, -1),
            jnp.asarray(matrix.T, x.dtype),
            precision=matmul_precision(x),
        )
        x = jnp.moveaxis(moved, -1, axis)
    return x


_INTERPOLATE = define("interpolate", float_op(_interpolate))


def interpolate(
    t: Tensor,
    scale_factor: tuple[float, ...] | None = (1.0, 1.0, 1.0, 1.0),
    mode: InterpolateType | None = "nearest",
    nearest_mode: InterpolateNearestType | None = "round_prefer_floor",
    coordinate_transformation_mode: InterpolateCoordinateTransformationType | None = "half_pixel",
) -> Tensor:
    """Resizes the spatial axes, as ONNX's Resize does; size n becomes floor(n * scale).

    Args:
        scale_factor: one for each axis, batch and channels too.
        mode: "nearest", "linear" or "cubic" (Keys' kernel with a = -0.75).
        nearest_mode: how "nearest" rounds.
        coordinate_transformation_mode: where output elements lie in the input.

    Raises:
        ValueError: another number of scales than axes, or an unknown mode.
    """
    scales = tuple(float(s) for s in scale_factor or (1.0,) * t.rank)
    if len(scales) != t.rank or min(scales) <= 0:
        raise ValueError(
            f"interpolate: scale_factor={scales} must be one positive number for each axis of "
            f"{t.id!r} of shape {t.shape}"
        )
    attrs = {
        "mode": mode or "nearest",
        "nearest_mode": nearest_mode or "round_prefer_floor",
        "transformation": coordinate_transformation_mode or "half_pixel",
    }
    kinds = (InterpolateType, InterpolateNearestType, InterpolateCoordinateTransformationType)
    for (name, value), kind in zip(attrs.items(), kinds, strict=True):
        if value not in get_args(kind):
            raise ValueError(
                f"interpolate: {name} {value!r} must be one of {', '.join(get_args(kind))}"
            )
    return emit(_INTERPOLATE, [t], {"scales": scales, **attrs})[0]


# ---- region of interest -------------------------------------------------------------------------
def _bin_mean_matrix(low: Any, high: Any, bins: int, samples: int, size: int) -> Any:
    """Returns (bins, size): means of `samples` linear interpolations in each bin of [low, high).

    Samples more than one element outside count as 0, the others as at the border.
    """
    length = jnp.maximum(high - low, 1.0)
    steps = (jnp.arange(bins * samples, dtype=low.dtype) + 0.5) / samples
    x = low + steps * length / bins
    inside = (x >= -1.0) & (x <= size)
    x = jnp.clip(x, 0.0, size - 1)
    distance = jnp.abs(x[:, None] - jnp.arange(size, dtype=low.dtype))
    weights = jnp.maximum(1.0 - distance, 0.0) * inside[:, None]
    return weights.reshape((bins, samples, size)).mean(1)


def _roi_align(
    x: Any,
    rois: Any,
    batch_index: Any,
    output_size: tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int,
) -> Any:
    height, width = x.shape[2:]
    boxes = lax.stop_gradient(rois.astype(x.dtype)) * jnp.asarray(spatial_scale, x.dtype)

    def pool_region(box: Any, image: Any) -> Any:
        rows = _bin_mean_matrix(box[1], box[3], output_size[0], sampling_ratio, height)
        columns = _bin_mean_matrix(box[0], box[2], output_size[1], sampling_ratio, width)
        return jnp.einsum(
            "ph,chw,qw->cpq", rows, x[image], columns, precision=matmul_precision(x, rows)
        )

    return jax.vmap(pool_region)(boxes, clamp_indices(batch_index, len(x)))


_ROI_ALIGN = define("roi_align", float_op(_roi_align))


def roi_align(
    t: Tensor,
    rois: Tensor,
    batch_index: Tensor,
    output_size: tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int,
) -> Tensor:
    """Mean-pools regions to one size by bilinear sampling (RoIAlign, He et al. 2017).

    Args:
        t: (batch, channels, height, width).
        rois: (regions, 4): x1, y1, x2, y2, before scaling. They receive no gradient.
        batch_index: (regions,), integers: the image of each region; one out of range counts as the
            nearest.
        output_size: height and width of the result.
        spatial_scale: from the coordinates of `rois` to those of `t`.
        sampling_ratio: samples in each bin along each axis.

    Returns:
        (regions, channels, *output_size).

    Raises:
        ValueError: shapes that do not fit, or a sampling ratio below 1.
        IndexError: `batch_index` is a constant with an index out of range.
    """
    check_indices("roi_align", batch_index)
    if not t.shape[:1] or not t.shape[0]:
        raise ValueError(f"roi_align: {t.id!r} of shape {t.shape} has no images")
    if not rois.dtype.is_floating_point:
        raise TypeError(f"roi_align: rois {rois.id!r} are floating-point, not {rois.dtype.name}")
    if t.rank != 4 or rois.rank != 2 or rois.shape[1] != 4 or batch_index.shape != rois.shape[:1]:
        raise ValueError(
            f"roi_align: {t.id!r} {t.shape}, {rois.id!r} {rois.shape} and {batch_index.id!r} "
            f"{batch_index.shape} must be (batch, channels, height, width), (regions, 4) and "
            "(regions,)"
        )
    check_constant_indices("roi_align", batch_index, t.shape[0])
    if sampling_ratio < 1:
        raise ValueError(f"roi_align: sampling_ratio must be at least 1, not {sampling_ratio}")
    height, width = output_size
    attrs = {"output_size": (int(height), int(width)), "spatial_scale": float(spatial_scale),
             "sampling_ratio": int(sampling_ratio)}  # fmt: skip
    return emit(_ROI_ALIGN, [t, rois, batch_index], attrs)[0]
