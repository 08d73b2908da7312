"""Which tensors share storage: in-place results and views form chains to their owners."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from popxl._core.known import found_once
from popxl._core.regions import Region, regions

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
    """Check that the references by which a graph changes tensors do not overlap.

    Raises:
        ValueError: two do, so that one of the changes would be lost.
    """
    for region in regions(op):
        if region.kind == "derivative":
            continue
        changed = {i for i in modified_inputs(region.graph) if region.reaches(op, i)}
        if changed:
            _check_disjoint(op, region, changed)


def _check_disjoint(op: Op, region: Region, changed: set[int]) -> None:
    graph = region.graph
    holders: dict[Tensor, list[int]] = {}
    for i, inner in enumerate(graph._inputs):
        if inner._by_ref or i in changed:
            for owner in dict.fromkeys(owners(op.inputs[region.position(i)])):
                holders.setdefault(owner, []).append(i)
    for owner, found in holders.items():
        for i, k in combinations(found, 2):
            parts = (op.inputs[region.position(j)] for j in (i, k))
            if not changed.isdisjoint((i, k)) and _overlap(owner, *parts):
                names = f"{graph._inputs[i].name!r} and {graph._inputs[k].name!r}"
                raise ValueError(
                    f"{op.name} at {op.location} passes {owner.id!r} as two references, {names} of "
                    f"graph {graph.id!r}, which changes it: pass it once, or parts of it that do "
                    "not overlap"
                )


def _overlap(owner: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether two tensors show an element of `owner` in common."""
    known: Stored = {}
    if owner in (stored_in(a, known), stored_in(b, known)):
        return owner.nelms > 0
    return np.intersect1d(_elements(a, owner), _elements(b, owner)).size > 0


def _elements(t: Tensor, owner: Tensor) -> np.ndarray:
    """Indices of the elements of `owner` that `t` shows."""
    known: Stored = {}
    shown = {owner: np.arange(owner.nelms).reshape(owner.shape)}
    waiting = [stored_in(t, known)]
    while waiting:
        t = waiting[-1]
        up = [stored_in(p, known) for p in viewed(t)]
        missing = [p for p in up if p not in shown]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        if t not in shown:
            op = t._producer
            if not up or op is None or op.defn.lower is None:
                shown[t] = np.full(t.shape, -1)
            else:
                shown[t] = np.asarray(op.defn.lower(*(shown[p] for p in up), **op.attrs))
    return shown[t][shown[t] >= 0]
