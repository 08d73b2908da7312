"""Which tensors share storage: in-place results and views form chains to their owners."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from popxl.graph import Graph
    from popxl.tensor import Tensor


def parents(t: Tensor) -> list[Tensor]:
    """Tensors whose storage `t` is (part of); empty if it owns its storage."""
    op = t._producer
    if op is None or op.outputs[0] is not t:
        return []
    if op.inplace is not None:
        return [op.inputs[op.inplace]]
    return list(op.inputs) if op.view else []


def owners(t: Tensor) -> Iterator[Tensor]:
    """The owners of the storage of `t`."""
    up = parents(t)
    if not up:
        yield t
    for p in up:
        yield from owners(p)


def modified_owners(graph: Graph) -> set[Tensor]:
    """Owners (inputs, variables, intermediates) that ops of `graph` modify."""
    found: set[Tensor] = set()
    for op in graph._ops:
        for i in op.modified_inputs():
            found.update(owners(op.inputs[i]))
    return found


def modified_inputs(graph: Graph) -> set[int]:
    """Indices of the inputs of `graph` whose value it changes."""
    changed = modified_owners(graph)
    return {i for i, t in enumerate(graph._inputs) if t in changed}
