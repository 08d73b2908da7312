"""Kernels that XLA joins on a GPU: what computes elements, or sums over them, from the same inputs.

A joined kernel reads its inputs once, and what it makes itself not at all (XLA's multi-output
fusion). Nor does one that normalises rows, of up to `_LONGEST_ROW` elements, read them again after
its sums: XLA makes one Triton kernel of it, but not where another kernel sums the same values by
columns, as for the gradient of a norm's weight. `tests/planning/test_h100.py` compares the bytes
with those of XLA's executables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from popxl.plan.flat_jaxpr import PrimitiveNode, PrimitiveValue

_RECENT = 8
"""Kernels of one shape that a new one is compared with, so that time is linear."""
_LONGEST_ROW = 2**14
"""Elements of the longest row that a block of XLA's Triton kernels holds (compiled for an H100)."""


@dataclass
class _Group:
    """Nodes that are one kernel.

    Attributes:
        axes: that its reductions sum over; None: it has none.
        values: that it reads, or makes element by element.
        needs: groups that it depends on, as bits.
        sums: of rows, that it makes and can use.
    """

    bit: int
    axes: Any
    values: set[PrimitiveValue] = field(default_factory=set)
    needs: int = 0
    sums: set[PrimitiveValue] = field(default_factory=set)


def joined_reads(
    nodes: Sequence[PrimitiveNode],
    reads: Sequence[Mapping[PrimitiveValue, int]],
    is_joinable: Callable[[PrimitiveNode], bool],
) -> dict[PrimitiveNode, set[PrimitiveValue]]:
    """Returns, by node, the values that its kernel reads or makes for other nodes already.

    Args:
        reads: of each node, the values that it reads from memory.
        is_joinable: true for what computes elements or sums, and writes them to memory.
    """
    groups: list[_Group] = []
    by_shape: dict[tuple[int, ...], list[_Group]] = {}
    needs: dict[PrimitiveValue, int] = {}  # groups that a value depends on, as bits
    joined = {}
    by_columns = _values_summed_by_columns(nodes, reads)
    for node, read in zip(nodes, reads, strict=True):
        depends = 0
        for value in (*node.inputs, *read):
            depends |= needs.get(value, 0)
        if is_joinable(node) and read:
            shape, axes = _iterated_shape(node), node.params.get("axes")
            same = by_shape.setdefault(shape, [])
            group = _group_to_join(same[-_RECENT:], node, read, axes, needs, groups)
            if group is None:
                group = _Group(1 << len(groups), axes)
                groups.append(group)
                same.append(group)
            else:
                joined[node] = group.values & read.keys()
            group.axes = group.axes or axes
            group.needs |= depends & ~group.bit
            group.values.update(read)
            if not axes:
                group.values.update(node.outputs)
            elif _sums_rows(node) and by_columns.isdisjoint(read):
                group.sums.update(node.outputs)
            depends |= group.bit
        needs.update(dict.fromkeys(node.outputs, depends))
    return joined


def _values_summed_by_columns(
    nodes: Sequence[PrimitiveNode], reads: Sequence[Mapping[PrimitiveValue, int]]
) -> set[PrimitiveValue]:
    """Returns the values in memory that sums over other axes than the last read."""
    pairs = zip(nodes, reads, strict=True)
    sums = (read for node, read in pairs if node.params.get("axes") and not _sums_rows(node))
    return {value for read in sums for value in read}


def _sums_rows(node: PrimitiveNode) -> bool:
    """True for a reduction of short rows, along the last axis alone."""
    shape = _shape(node.atoms[0])
    return node.params.get("axes") == (len(shape) - 1,) and shape[-1] <= _LONGEST_ROW


def _iterated_shape(node: PrimitiveNode) -> tuple[int, ...]:
    """Returns the shape of the elements that a node computes or reduces."""
    largest = max((*node.atoms, *node.outputs), key=lambda v: math.prod(_shape(v)))
    return tuple(n for n in _shape(largest) if n > 1)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value.aval, "shape", ()))


def _group_to_join(
    candidates: Sequence[_Group],
    node: PrimitiveNode,
    read: Mapping[PrimitiveValue, int],
    axes: Any,
    needs: Mapping[PrimitiveValue, int],
    groups: Sequence[_Group],
) -> _Group | None:
    """Returns the last kernel that can compute a node, too, and has its largest input."""
    size = math.prod(_iterated_shape(node))
    large = {v for v in read if math.prod(_shape(v)) >= size}
    for group in reversed(candidates):
        if axes and group.axes and axes != group.axes:
            continue
        if large.isdisjoint(group.values):
            continue
        others = [v for v in read if v not in group.values and v not in group.sums]
        if not any(_closure(needs.get(v, 0), groups) & group.bit for v in others):
            return group
    return None


def _closure(bits: int, groups: Sequence[_Group]) -> int:
    """Returns the groups that some groups depend on, themselves included."""
    found, waiting = 0, bits
    while waiting:
        found |= waiting
        new = 0
        while waiting:
            lowest = waiting & -waiting
            new |= groups[lowest.bit_length() - 1].needs
            waiting ^= lowest
        waiting = new & ~found
    return found
