"""Which tensors share storage: in-place results and views form chains to their owners."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from popxl._core.known import found_once

if TYPE_CHECKING:
    from popxl._core.op import Op
    from popxl.graph import Graph
    from popxl.tensor import Tensor

Stored = dict["Tensor", "Tensor"]


def stored_in(t: Tensor, known: Stored) -> Tensor:
    """The tensor that `t` is, if `t` is the result of ops in place: not one itself.

    Args:
        known: what was found so far. Chains are as long as a program has updates of a variable, so
            walking along many of them needs it.
    """
    passed = []
    while t not in known:
        op = t._producer
        if op is None or op.inplace is None or op.outputs[0] is not t:
            known[t] = t
            break
        passed.append(t)
        t = op.inputs[op.inplace]
    known.update(dict.fromkeys(passed, known[t]))
    return known[t]


def viewed(t: Tensor) -> list[Tensor]:
    """The tensors that `t`, no result in place, is a view of; empty if it owns its storage."""
    op = t._producer
    return list(op.inputs) if op is not None and op.view and op.outputs[0] is t else []


def owners(t: Tensor, known: Stored | None = None) -> Iterator[Tensor]:
    """The owners of the storage of `t`. `known` as for `stored_in`."""
    known = {} if known is None else known
    waiting = [t]
    while waiting:
        root = stored_in(waiting.pop(), known)
        up = viewed(root)
        waiting += reversed(up)
        if not up:
            yield root


def modified_owners(graph: Graph) -> set[Tensor]:
    """Owners (inputs, variables, intermediates) that ops of `graph` modify."""
    found: set[Tensor] = set()
    known: Stored = {}
    for op in graph._ops:
        for i in op.modified_inputs():
            found.update(owners(op.inputs[i], known))
    return found


@found_once
def modified_inputs(graph: Graph) -> frozenset[int]:
    """Indices of the inputs of `graph` whose value it changes."""
    changed = modified_owners(graph)
    return frozenset(i for i, t in enumerate(graph._inputs) if t in changed)


def check_references(op: Op) -> None:
    """Check that no two inputs by which a graph changes tensors are one tensor, or parts of one.

    Raises:
        ValueError: two are, so that one of the changes would be lost.
    """
    changed = op.modified_inputs()
    if not changed:
        return
    first = 1 if "then" in op.attrs else 0  # behind a condition the branches' inputs
    for graph in op.called_graphs():
        _check_distinct(op, graph, first, changed)
        first += len(graph._inputs)


def _check_distinct(op: Op, graph: Graph, first: int, changed: set[int]) -> None:
    holder: dict[Tensor, int] = {}
    for i, inner in enumerate(graph._inputs):
        if not (inner._by_ref or first + i in changed):
            continue
        for owner in owners(op.inputs[first + i]):
            other = holder.setdefault(owner, i)
            if other != i and not changed.isdisjoint((first + i, first + other)):
                names = f"{graph._inputs[other].name!r} and {inner.name!r}"
                raise ValueError(
                    f"{op.name} at {op.location} passes {owner.id!r} as two references, {names} of "
                    f"graph {graph.id!r}, which changes it: pass it once"
                )
