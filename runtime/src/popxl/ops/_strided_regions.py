"""Strided regions of tensors with permuted axes: compositions of slices and transposes.

A region says for each axis `(first, count, step)`: the index of the first element that is taken,
how many are taken, and the distance to the next one, which may be negative.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from popxl._ir.op_registry import OpDef, define
from popxl.ops.placement import unfused_update

if TYPE_CHECKING:
    from popxl._ir.op import Op

Region = tuple[tuple[int, int, int], ...]


def with_positive_steps(region: Region) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Returns a strided region with positive steps, and the axes to reverse after it is read."""
    reverse = [i for i, (_, _, step) in enumerate(region) if step < 0]
    up = [
        (first + max(count - 1, 0) * step, count, -step) if step < 0 else
        (first, count, step)
        for first, count, step in region
    ]  # fmt: skip
    return up, reverse


def inverse_permutation(permutation: Sequence[int]) -> tuple[int, ...]:
    """Returns the inverse of a permutation of axes."""
    return tuple(int(i) for i in np.argsort(permutation))


def read_region(x: Any, region: Region) -> Any:
    """Returns the elements of `x` in a strided region."""
    up, reverse = with_positive_steps(region)
    starts = [first for first, _, _ in up]
    stops = [first + (count - 1) * step + 1 if count else first for first, count, step in up]
    part = lax.slice(x, starts, stops, [step for _, _, step in up])
    return lax.rev(part, reverse) if reverse else part


def write_region(inputs: tuple[Any, ...], value: Any, region: Region) -> tuple[Any]:
    """Returns the input array, in a tuple, with `value` written into a strided region."""
    x = inputs[0]
    up, reverse = with_positive_steps(region)
    part = lax.rev(value, reverse) if reverse else value
    if all(step == 1 for _, _, step in up):
        return (lax.dynamic_update_slice(x, unfused_update(part), [first for first, _, _ in up]),)
    at = tuple(builtins.slice(first, first + count * step, step) for first, count, step in up)
    return (x.at[at].set(part),)


# ---- parts of parts -----------------------------------------------------------------------------
def _read_view(x: Any, region: Region, permutation: tuple[int, ...]) -> Any:
    return jnp.transpose(read_region(x, region), permutation)


def _write_view(
    inputs: tuple[Any, ...], value: Any, region: Region, permutation: tuple[int, ...]
) -> tuple[Any]:
    return write_region(inputs, jnp.transpose(value, inverse_permutation(permutation)), region)


def merge_regions(first: Op, second: Op) -> tuple[OpDef, dict[str, Any]] | None:
    """Composes two strided views into one op, as `OpDef.merge` requires; None if impossible."""
    if merge_regions is not first.defn.merge:
        return None
    region, order = _region_and_permutation(first)
    outer, permutation = _region_and_permutation(second)
    inner = list(region)
    for axis, (start, count, step) in zip(order, outer, strict=True):
        begin, _, stride = region[axis]
        inner[axis] = begin + start * stride, count, stride * step
    merged = tuple(order[i] for i in permutation)
    return PART, {"region": tuple(inner), "permutation": merged}


def _region_and_permutation(op: Op) -> tuple[Region, tuple[int, ...]]:
    shape = op.inputs[0].shape
    region = op.attrs.get("region", tuple((0, n, 1) for n in shape))
    return region, op.attrs.get("permutation", tuple(range(len(shape))))


PART = define("part", _read_view, view_write=_write_view, merge=merge_regions, tags=("movement",))
