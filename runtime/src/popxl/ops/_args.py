"""Arguments of ops: axes and shapes as PopXL lets them be written, normalised for attributes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from popxl.context import get_source_location

if TYPE_CHECKING:
    from popxl.tensor import Tensor

Axes = int | Iterable[int] | None


def check_tensors(op: str, *tensors: object) -> None:
    """Raise TypeError for what is no tensor."""
    from popxl.tensor import Tensor

    for t in tensors:
        if not isinstance(t, Tensor):
            raise TypeError(
                f"{op} at {get_source_location()} takes tensors, but got {t!r} of type "
                f"{type(t).__name__}: make a constant of it"
            )


def normalize_axis(op: str, t: Tensor, axis: int, extra: int = 0) -> int:
    """`axis` counted from the front.

    Args:
        extra: how many more axes than `t` the axis may refer to.

    Raises:
        ValueError: `t` has no such axis.
    """
    check_tensors(op, t)
    rank = t.rank + extra
    if not -rank <= axis < rank:
        raise ValueError(f"{op}: axis {axis} is out of range for {t.id!r} of shape {t.shape}")
    return int(axis) % rank


def normalize_axes(op: str, t: Tensor, axis: Axes) -> tuple[int, ...]:
    """Sorted axes counted from the front; None means all.

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
    """The attribute of a hint for other hardware, if it is given."""
    return {} if proportion is None else {"available_memory_proportion": float(proportion)}


def check_same_length(op: str, **lists: Iterable[object] | None) -> None:
    """Raise ValueError unless the given lists, those that are None left out, are equally long."""
    lengths = {name: len(list(values)) for name, values in lists.items() if values is not None}
    if len(set(lengths.values())) > 1:
        text = ", ".join(f"{name} has {n}" for name, n in lengths.items())
        raise ValueError(f"{op}: its arguments must have one entry for each axis, but {text}")
