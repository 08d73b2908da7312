"""Average and max pooling over the spatial axes of (batch, channels, *spatial) tensors."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from popxl._ir.op_registry import OpDef, define
from popxl.ops._emit import emit
from popxl.ops._numerics import float_op
from popxl.ops._windows import (
    PadType,
    Pairs,
    check_pad_type,
    dilated_extent,
    padding_pairs,
    values_per_axis,
)
from popxl.tensor import Tensor


def _reduce_windows(
    x: Any,
    initial: float,
    reducer: Any,
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    pads: Pairs,
    dilations: tuple[int, ...],
    in_dilations: tuple[int, ...],
) -> Any:
    return lax.reduce_window(
        x,
        np.asarray(initial, x.dtype),
        reducer,
        (1, 1, *kernel),
        (1, 1, *strides),
        ((0, 0), (0, 0), *pads),
        (1, 1, *in_dilations),
        (1, 1, *dilations),
    )


def _average_windows(x: Any, **window: Any) -> Any:
    """Averages pooling windows; padding counts neither in the sum nor in the count."""
    count = _reduce_windows(jnp.ones((1, 1, *x.shape[2:]), x.dtype), 0.0, lax.add, **window)
    return _reduce_windows(x, 0.0, lax.add, **window) / count


def _max_windows(x: Any, **window: Any) -> Any:
    return _reduce_windows(x, -np.inf, lax.max, **window)


_AVERAGE_POOL = define("average_pool", float_op(_average_windows), result="averagepool_out")
_MAX_POOL = define("max_pool", float_op(_max_windows))


def _emit_pool(
    defn: OpDef,
    t: Tensor,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    out_pads: Any,
    dilation: Any,
    in_dilations: Any,
    auto_pad: Any,
    ceil_mode: bool,
) -> Tensor:
    op, rank = defn.name, t.rank - 2
    if rank < 1:
        raise ValueError(f"{op}: {t.id!r} of shape {t.shape} must be (batch, channels, ...)")
    if any(out_pads or ()):
        raise ValueError(f"{op}: out_pads={out_pads} of {t.id!r} are not supported; slice instead")
    kernel = values_per_axis(op, "kernel_size", kernel_size, rank)
    strides = values_per_axis(op, "stride", stride, rank)
    dilations = values_per_axis(op, "dilation", dilation, rank)
    spread = values_per_axis(op, "in_dilations", in_dilations, rank)
    sizes = [dilated_extent(n, d) for n, d in zip(t.shape[2:], spread, strict=True)]
    extents = [dilated_extent(k, d) for k, d in zip(kernel, dilations, strict=True)]
    given = values_per_axis(op, "padding", padding, 2 * rank, 0)
    pads = padding_pairs(sizes, extents, strides, given, check_pad_type(op, auto_pad))
    if ceil_mode:
        pads = tuple(
            (b, e + _ceil_mode_padding(n, k, s, b, e))
            for n, k, s, (b, e) in zip(sizes, extents, strides, pads, strict=True)
        )
    attrs = {"kernel": kernel, "strides": strides, "pads": pads, "dilations": dilations,
             "in_dilations": spread}  # fmt: skip
    return emit(defn, [t], attrs)[0]


def _ceil_mode_padding(
    size: int, window: int, stride: int, start_padding: int, end_padding: int
) -> int:
    """Returns the end padding that completes a last pooling window that starts inside the input."""
    rest = (size + start_padding + end_padding - window) % stride
    starts_at = size + start_padding + end_padding - window - rest + stride
    return stride - rest if rest and starts_at < size + start_padding else 0


def average_pool(
    t: Tensor,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
    padding: tuple[int, ...] | None = None,
    out_pads: tuple[int, ...] | None = None,
    dilation: tuple[int, ...] | None = None,
    in_dilations: tuple[int, ...] | None = None,
    auto_pad: PadType | None = "not_set",
    ceil_mode: bool = False,
) -> Tensor:
    """Returns the mean of the elements in each window; padding does not count.

    Args:
        t: (batch, channels, *spatial).
        kernel_size: size of the window along each spatial axis.
        stride: distance of windows, default 1; padding, dilation, auto_pad: as for `conv`.
        out_pads: must be 0.
        in_dilations: zeros inserted between elements, plus 1.
        ceil_mode: also take windows that reach beyond the end but start inside.

    Raises:
        ValueError: arguments that do not fit the number of axes.
    """
    return _emit_pool(
        _AVERAGE_POOL, t, kernel_size, stride, padding, out_pads, dilation, in_dilations, auto_pad,
        ceil_mode,
    )  # fmt: skip


def max_pool(
    t: Tensor,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
    padding: tuple[int, ...] | None = None,
    out_pads: tuple[int, ...] | None = None,
    dilation: tuple[int, ...] | None = None,
    in_dilations: tuple[int, ...] | None = None,
    auto_pad: PadType | None = "not_set",
    ceil_mode: bool = False,
    storage_order: Literal["row", "column"] = "row",
) -> Tensor:
    """Returns the largest element of each window; arguments as for `average_pool`.

    No gradient if dilated.

    Args:
        storage_order: order of indices, which are not returned; no effect.
    """
    return _emit_pool(
        _MAX_POOL, t, kernel_size, stride, padding, out_pads, dilation, in_dilations, auto_pad,
        ceil_mode,
    )  # fmt: skip
