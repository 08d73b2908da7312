"""Normalization of op arguments (axes, shapes) from PopXL's notations to op attributes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from popxl.context import get_source_location

if TYPE_CHECKING:
    from popxl.tensor import Tensor

Axes = int | Iterable[int] | None


def check_tensors(op: str, *tensors: object) -> None:
    """Raises TypeError for arguments that are not tensors."""
    from popxl.tensor import Tensor

    for t in tensors:
        if not isinstance(t, Tensor):
            raise TypeError(
                f"{op} at {get_source_location()} takes tensors, but got {t!r} of type "
                f"{type(t).__name__}: make a constant of it"
            )


def normalize_axis(op: str, t: Tensor, axis: int, extra_axes: int = 0) -> int:
    """Returns the axis number `axis` counted from the front (nonnegative).

    Args:
        extra_axes: how many more axes than `t` the axis may refer to.

    Raises:
        ValueError: `t` has no such axis.
    """
    check_tensors(op, t)
    rank = t.rank + extra_axes
    if not -rank <= axis < rank:
        raise ValueError(f"{op}: axis {axis} is out of range for {t.id!r} of shape {t.shape}")
    return int(axis) % rank


def normalize_axes(op: str, t: Tensor, axis: Axes) -> tuple[int, ...]:
    """Returns sorted axis numbers counted from the front; None means all axes.

    Raises:
        ValueError: `t` has no such axis, or one is given twice.
    """
    check_tensors(op, t)
    if axis is None:
        return tuple(range(t.rank))
    given = [axis] if isinstance(axis, int) else list(axis)
    axes = sorted(normalize_axis(op, t, a) for a in given)
    if len(set(axes)) != len(axes):
        raise ValueError(f"{op}: axis {given} of {t.id!r} names an axis twice")
    return tuple(axes)


def as_hint_attribute(proportion: float | None) -> dict[str, float]:
    """Returns the attributes for the hint `available_memory_proportion`; {} if it is None."""
    return {} if proportion is None else {"available_memory_proportion": float(proportion)}


def check_same_length(op: str, **lists: Iterable[object] | None) -> None:
    """Raises ValueError unless all list arguments that are not None have one length."""
    lengths = {name: len(list(values)) for name, values in lists.items() if values is not None}
    if len(set(lengths.values())) > 1:
        text = ", ".join(f"{name} has {n}" for name, n in lengths.items())
        raise ValueError(f"{op}: its arguments must have one entry for each axis, but {text}")
