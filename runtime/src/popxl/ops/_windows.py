"""Sliding windows over the spatial axes of (batch, channels, *spatial) tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

PadType = Literal["not_set", "same_upper", "same_lower", "valid"]
Pairs = tuple[tuple[int, int], ...]

_PAD_TYPES = ("not_set", "same_upper", "same_lower", "valid")


def values_per_axis(
    op: str, name: str, values: Iterable[int] | None, rank: int, default: int = 1
) -> tuple[int, ...]:
    """Returns one window value per spatial axis; a missing or single one fits any rank.

    Raises:
        ValueError: another number of values than axes.
    """
    given = (default,) * rank if values is None else tuple(int(v) for v in values)
    if len(given) != rank and len(set(given)) == 1:
        given = given[:1] * rank
    if len(given) != rank:
        raise ValueError(f"{op}: {name}={given} needs one value for each of {rank} spatial axes")
    return given


def check_pad_type(op: str, pad_type: str | None) -> str:
    """Returns a convolution's `pad_type`, "not_set" for None; raises ValueError if unknown."""
    if (pad_type or "not_set") not in _PAD_TYPES:
        raise ValueError(f"{op}: pad_type {pad_type!r} must be one of {', '.join(_PAD_TYPES)}")
    return pad_type or "not_set"


def dilated_extent(kernel: int, dilation: int) -> int:
    """Returns the number of elements that a dilated window spans along one axis."""
    return (kernel - 1) * dilation + 1


def split_padding(total: int, pad_type: str) -> tuple[int, int]:
    """Splits an axis's padding into start and end; "same_upper" puts the odd one at the end."""
    small, large = total // 2, total - total // 2
    return (small, large) if pad_type == "same_upper" else (large, small)


def padding_pairs(
    sizes: Sequence[int],
    extents: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    pad_type: str,
) -> Pairs:
    """Returns the (start, end) padding of each spatial axis of a window op.

    Args:
        padding: all begins, then all ends, as ONNX has it; used if `pad_type` is "not_set".
    """
    rank = len(sizes)
    if pad_type == "valid":
        return ((0, 0),) * rank
    if pad_type == "not_set":
        return tuple(zip(padding[:rank], padding[rank:], strict=True))
    return tuple(
        split_padding(max((-(-n // s) - 1) * s + k - n, 0), pad_type)
        for n, k, s in zip(sizes, extents, strides, strict=True)
    )
