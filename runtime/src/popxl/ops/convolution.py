"""Convolutions over (batch, channels, *spatial) tensors, in ONNX's conventions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl import dtypes
from popxl._analysis.shape_inference import abstract_outputs
from popxl._ir.op_registry import NoGrad, define
from popxl.ops._emit import emit
from popxl.ops._numerics import check_floating, is_float8, matmul_precision
from popxl.ops._reductions import traced_platform
from popxl.ops._windows import (
    PadType,
    Pairs,
    check_pad_type,
    dilated_extent,
    padding_pairs,
    split_padding,
    values_per_axis,
)
from popxl.ops.float8_143_152 import SCALE_CHECK, check_float8, check_scale, scale_by_pow2
from popxl.tensor import Tensor, TensorSpec

_FLOAT8 = NoGrad("float8 convolutions are for inference")


# ---- meaning ------------------------------------------------------------------------------------
def _convolve(x: Any, w: Any, strides: Any, pads: Pairs, dilations: Any, **kwargs: Any) -> Any:
    spatial = "HWDXYZ"[: x.ndim - 2]
    layouts = (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}")
    return lax.conv_general_dilated(
        x,
        w,
        strides,
        pads,
        rhs_dilation=dilations,
        dimension_numbers=layouts,
        precision=matmul_precision(x, w),
        **kwargs,
    )


def _conv(
    x: Any,
    w: Any,
    strides: tuple[int, ...],
    pads: Pairs,
    dilations: tuple[int, ...],
    groups: int,
    hints: Any = None,
) -> Any:
    check_floating(x)
    return _convolve(x, w, strides, pads, dilations, feature_group_count=groups)


def _conv_transpose(
    x: Any,
    w: Any,
    strides: tuple[int, ...],
    pads: Pairs,
    dilations: tuple[int, ...],
    groups: int,
    hints: Any = None,
) -> Any:
    """Transposed convolution: the input is dilated by the strides, the kernel is flipped."""
    check_floating(x)
    if not w.size:
        raise ValueError(f"the weight of shape {w.shape} has no elements")
    kernel = w.shape[2:]
    split = w.reshape((groups, w.shape[0] // groups, w.shape[1], *kernel))
    swapped = jnp.swapaxes(split, 1, 2).reshape((-1, w.shape[0] // groups, *kernel))
    flipped = lax.rev(swapped, range(2, w.ndim))
    extents = [dilated_extent(k, d) for k, d in zip(kernel, dilations, strict=True)]
    edges = tuple((k - 1 - b, k - 1 - e) for k, (b, e) in zip(extents, pads, strict=True))
    return _convolve(x, flipped, (1,) * len(kernel), edges, dilations, lhs_dilation=strides,
                     feature_group_count=groups)  # fmt: skip


def _with_float8_scale(fn: Any) -> Any:
    """Decorates a convolution to take float8 tensors: the result times 2^log2_scale, as float16."""

    def lower(x: Any, w: Any, log2_scale: Any, **attrs: Any) -> Any:
        if not (is_float8(x) and is_float8(w)):
            raise TypeError(f"it takes float8 tensors, not {x.dtype} and {w.dtype}")
        operands = x.astype(jnp.float32), w.astype(jnp.float32)
        if (
            traced_platform() == "gpu"
        ):  # else XLA asks cuDNN for a convolution of float8, which has none
            operands = lax.optimization_barrier(operands)
        product = fn(*operands, **attrs)
        return scale_by_pow2(product, log2_scale).astype(jnp.float16)

    return lower


_CONV = define("conv", _conv, dtypes="same")
_CONV_SCALED = define("conv_pow2scaled", _with_float8_scale(_conv), grad=_FLOAT8, check=SCALE_CHECK)
_TRANSPOSE = define(
    "conv_transpose",
    _conv_transpose,
    infer=lambda *specs, **attrs: _infer_transpose(*specs, **attrs),
    dtypes="same",
    result="convtranspose_out",
)
_TRANSPOSE_SCALED = define(
    "conv_transpose_pow2scaled",
    _with_float8_scale(_conv_transpose),
    infer=lambda *specs, **attrs: _infer_transpose(*specs, **attrs),
    grad=_FLOAT8,
    check=SCALE_CHECK,
)


# ---- arguments ----------------------------------------------------------------------------------
def _common_attrs(
    op: str, t: Tensor, weight: Tensor, stride: Any, dilation: Any, groups: int | None, **hints: Any
) -> dict[str, Any]:
    rank = t.rank - 2
    if rank < 1 or weight.rank != t.rank:
        raise ValueError(
            f"{op}: {t.id!r} of shape {t.shape} must be (batch, channels, ...), and "
            f"{weight.id!r} of shape {weight.shape} must have as many axes"
        )
    given = tuple((k, _as_hashable(v)) for k, v in hints.items() if v is not None)
    return {
        "strides": values_per_axis(op, "stride", stride, rank),
        "dilations": values_per_axis(op, "dilation", dilation, rank),
        "groups": int(groups or 1),
        **({"hints": given} if given else {}),
    }


def _as_hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _conv_attrs(
    op: str, t: Tensor, weight: Tensor, padding: Any, pad_type: Any, **common: Any
) -> dict[str, Any]:
    attrs = _common_attrs(op, t, weight, **common)
    rank = t.rank - 2
    extents = [
        dilated_extent(k, d) for k, d in zip(weight.shape[2:], attrs["dilations"], strict=True)
    ]
    pads = padding_pairs(
        t.shape[2:],
        extents,
        attrs["strides"],
        values_per_axis(op, "padding", padding, 2 * rank, 0),
        check_pad_type(op, pad_type),
    )
    return {**attrs, "pads": pads}


def _transpose_attrs(
    op: str,
    t: Tensor,
    weight: Tensor,
    padding: Any,
    pad_type: Any,
    output_padding: Iterable[int] | None,
    output_shape: Iterable[int] | None,
    **common: Any,
) -> dict[str, Any]:
    """Returns attributes of a transposed convolution; its pads are cropped from the full result.

    Pads become (start, end - output padding).
    """
    attrs = _common_attrs(op, t, weight, **common)
    rank, kind = t.rank - 2, check_pad_type(op, pad_type)
    extra = values_per_axis(op, "output_padding", tuple(output_padding or ()) or None, rank, 0)
    extents = [
        dilated_extent(k, d) for k, d in zip(weight.shape[2:], attrs["dilations"], strict=True)
    ]
    full = [
        (n - 1) * s + k + e
        for n, s, k, e in zip(t.shape[2:], attrs["strides"], extents, extra, strict=True)
    ]
    output_sizes = _spatial_output_shape(op, output_shape, t, rank)
    if not output_sizes and kind.startswith("same"):
        output_sizes = tuple(n * s for n, s in zip(t.shape[2:], attrs["strides"], strict=True))
    if output_sizes:
        pads = tuple(split_padding(f - w, kind) for f, w in zip(full, output_sizes, strict=True))
    else:
        given = values_per_axis(op, "padding", padding, 2 * rank, 0)
        pads = padding_pairs(t.shape[2:], extents, attrs["strides"], given, kind)
    output_pads = tuple((b, e - x) for (b, e), x in zip(pads, extra, strict=True))
    return {**attrs, "pads": output_pads}


def _spatial_output_shape(
    op: str, output_shape: Iterable[int] | None, t: Tensor, rank: int
) -> tuple[int, ...]:
    """Returns the requested spatial sizes, from a full or a spatial output shape; () for none."""
    given = tuple(int(n) for n in output_shape or ())
    if given and len(given) not in (rank, rank + 2):
        raise ValueError(
            f"{op}: output_shape {given} must be (batch, channels, *spatial) or the {rank} spatial "
            f"sizes for {t.id!r} of shape {t.shape}"
        )
    return given[-rank:]


def _infer_transpose(
    x: TensorSpec,
    w: TensorSpec,
    *scale_specs: TensorSpec,
    strides: tuple[int, ...],
    pads: Pairs,
    dilations: tuple[int, ...],
    groups: int,
    hints: Any = None,
) -> list[TensorSpec]:
    """Infers the output spec of a transposed convolution; sizes below 1 cannot be computed."""
    attrs = {"strides": strides, "pads": pads, "dilations": dilations, "groups": groups}
    extents = [dilated_extent(k, d) for k, d in zip(w.shape[2:], dilations, strict=True)]
    sizes = [
        (n - 1) * s + k - b - e
        for n, s, k, (b, e) in zip(x.shape[2:], strides, extents, pads, strict=True)
    ]
    if min(sizes) > 0:
        defn = _TRANSPOSE_SCALED if scale_specs else _TRANSPOSE
        (output,) = abstract_outputs(defn, (x, w, *scale_specs), attrs)
        return [TensorSpec(output.shape, dtypes.dtype.as_dtype(output.dtype))]
    dtype = dtypes.float16 if scale_specs else x.dtype
    return [TensorSpec._unchecked((x.shape[0], w.shape[1] * groups, *sizes), dtype)]


# ---- public functions ---------------------------------------------------------------------------
def conv(
    t: Tensor,
    weight: Tensor,
    stride: tuple[int, ...] | None = (1, 1),
    padding: tuple[int, ...] | None = (0, 0, 0, 0),
    dilation: tuple[int, ...] | None = (1, 1),
    groups: int | None = 1,
    pad_type: PadType | None = "not_set",
    available_memory_proportions: list[float] | None = None,
    partials_types: list[str] | None = None,
    enable_conv_dithering: list[int] | None = None,
) -> Tensor:
    """Convolves (cross-correlates) over the spatial axes.

    Args:
        t: (batch, channels, *spatial), one or more spatial axes.
        weight: (out_channels, channels / groups, *kernel), of the dtype of `t`.
        stride, dilation: one value for each spatial axis.
        padding: zeros added, at the begin of each spatial axis, then at the end of each.
        groups: channels are cut into so many groups, each with its own kernels.
        pad_type: "same_upper" and "same_lower" pad such that a stride of 1 keeps the size, with
            the odd zero at the end or the begin; "valid" pads nothing; "not_set" uses `padding`.
        available_memory_proportions, partials_types, enable_conv_dithering: hints for other
            hardware; recorded, no effect.

    Raises:
        ValueError: arguments that do not fit the number of axes.
        SpecError: channels that do not fit.
    """
    attrs = _conv_attrs(
        "conv", t, weight, padding, pad_type, stride=stride, dilation=dilation, groups=groups,
        available_memory_proportions=available_memory_proportions, partials_types=partials_types,
        enable_conv_dithering=enable_conv_dithering,
    )  # fmt: skip
    return emit(_CONV, [t, weight], attrs)[0]


def conv_pow2scaled(
    t: Tensor,
    weight: Tensor,
    log2_scale: Tensor,
    stride: tuple[int, ...] | None = (1, 1),
    padding: tuple[int, ...] | None = (0, 0, 0, 0),
    dilation: tuple[int, ...] | None = (1, 1),
    groups: int | None = 1,
    pad_type: PadType | None = "not_set",
    available_memory_proportions: list[float] | None = None,
    enable_conv_dithering: list[int] | None = None,
) -> Tensor:
    """Convolves float8 tensors like `conv`, times 2^log2_scale, as float16.

    Args:
        log2_scale: int32 tensor of one element, in [-32, 32). The others are as for `conv`.

    Raises:
        TypeError: the operands are not float8, or the scale is not int32.
        ValueError: the scale is not one element.
    """
    check_float8("conv_pow2scaled", t, weight)
    check_scale("conv_pow2scaled", log2_scale)
    attrs = _conv_attrs(
        "conv_pow2scaled", t, weight, padding, pad_type, stride=stride, dilation=dilation,
        groups=groups, available_memory_proportions=available_memory_proportions,
        enable_conv_dithering=enable_conv_dithering,
    )  # fmt: skip
    return emit(_CONV_SCALED, [t, weight, log2_scale], attrs)[0]


def conv_transpose(
    t: Tensor,
    weight: Tensor,
    stride: tuple[int, ...] | None = (1, 1),
    padding: tuple[int, ...] | None = (0, 0, 0, 0),
    dilation: tuple[int, ...] | None = (1, 1),
    groups: int | None = 1,
    pad_type: PadType | None = "not_set",
    output_padding: tuple[int, ...] | None = (),
    output_shape: tuple[int, ...] | None = (),
    available_memory_proportions: list[float] | None = None,
    partials_types: list[str] | None = None,
    enable_conv_dithering: list[int] | None = None,
) -> Tensor:
    """Transposed convolution: the gradient of `conv` with respect to its input.

    Args:
        t: (batch, channels, *spatial).
        weight: (channels, out_channels / groups, *kernel), of the dtype of `t`.
        padding: what is cut off, at the begin of each spatial axis, then at the end of each.
        output_padding: elements added at the end of each spatial axis.
        output_shape: shape of the result, or its spatial sizes, from which the padding then
            follows; what is beyond the transposed convolution is zeros.
        stride, dilation, groups, pad_type: of the convolution that it transposes; the hints as
            for `conv`.
    """
    attrs = _transpose_attrs(
        "conv_transpose", t, weight, padding, pad_type, output_padding, output_shape, stride=stride,
        dilation=dilation, groups=groups, available_memory_proportions=available_memory_proportions,
        partials_types=partials_types, enable_conv_dithering=enable_conv_dithering,
    )  # fmt: skip
    return emit(_TRANSPOSE, [t, weight], attrs)[0]


def conv_transpose_pow2scaled(
    t: Tensor,
    weight: Tensor,
    log2_scale: Tensor,
    stride: tuple[int, ...] | None = (1, 1),
    padding: tuple[int, ...] | None = (0, 0, 0, 0),
    dilation: tuple[int, ...] | None = (1, 1),
    groups: int | None = 1,
    pad_type: PadType | None = "not_set",
    output_padding: tuple[int, ...] | None = (),
    output_shape: tuple[int, ...] | None = (),
    available_memory_proportions: list[float] | None = None,
    enable_conv_dithering: list[int] | None = None,
) -> Tensor:
    """Transposed convolution of float8 tensors, times 2^log2_scale, as float16.

    Scale and errors as for `conv_pow2scaled`.
    """
    check_float8("conv_transpose_pow2scaled", t, weight)
    check_scale("conv_transpose_pow2scaled", log2_scale)
    attrs = _transpose_attrs(
        "conv_transpose_pow2scaled", t, weight, padding, pad_type, output_padding, output_shape,
        stride=stride, dilation=dilation, groups=groups,
        available_memory_proportions=available_memory_proportions,
        enable_conv_dithering=enable_conv_dithering,
    )  # fmt: skip
    return emit(_TRANSPOSE_SCALED, [t, weight, log2_scale], attrs)[0]
