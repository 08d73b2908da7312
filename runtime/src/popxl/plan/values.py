"""A program as XLA gets it: values that are made once, and the nodes that make them.

Calls are inlined, in-place ops make new values, views are computed where they are read; loops and
branches have bodies. `popxl.plan.trace` makes this form, and everything else in the plan reads it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["primitive", "load", "store", "collective", "loop", "branch", "effect"]


class Value:
    """An array on one replica's device.

    Attributes:
        shape, itemsize: of the array; `itemsize` in bytes.
        producer: the node that makes it; None for arguments of the program, constants, and what
            enters a body anew in each iteration.
    """

    __slots__ = ("itemsize", "producer", "shape")

    def __init__(self, shape: Sequence[int], itemsize: int, producer: Node | None = None) -> None:
        self.shape, self.itemsize, self.producer = tuple(shape), itemsize, producer

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(eq=False, slots=True)
class Node:
    """What makes values.

    Attributes:
        kind: what sort of node it is.
        name: JAX's name of a primitive; the kind of a collective; else the name of the op.
        part: label of the part of the program it belongs to (see `popxl.plan.part`).
        flops: operations of matrix products and convolutions.
        arithmetic: other arithmetic operations, one for each element that is computed.
        bodies: of a loop one, of a branch two.
        count: iterations of a loop.
        carried: values that enter the body of a loop anew in each iteration, in the order of its
            outputs; the node's first inputs are what they start from.
        facts: what else the kind needs: the remote buffer or stream of a transfer, the replica
            group of a collective, the axes of a reduction.
    """

    kind: Kind
    name: str
    part: str
    inputs: list[Value]
    outputs: list[Value] = field(default_factory=list)
    flops: int = 0
    arithmetic: int = 0
    bodies: tuple[Block, ...] = ()
    count: int = 1
    carried: tuple[Value, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    def add_output(self, shape: Sequence[int], itemsize: int) -> Value:
        """A new value made by this node."""
        value = Value(shape, itemsize, self)
        self.outputs.append(value)
        return value


@dataclass(eq=False)
class Block:
    """Nodes in execution order, and the values that leave the block.

    Attributes:
        ops: number of ops of the program by (part, name), those of bodies not included.
        stored: what was last stored in remote buffers of one entry. XLA takes a store of all of a
            buffer for a new name of the value, which stays until the buffer is last loaded. None: a
            body stored something.
    """

    nodes: list[Node] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    ops: Counter[tuple[str, str]] = field(default_factory=Counter)
    stored: dict[Any, Value | None] = field(default_factory=dict)


def captured(node: Node) -> list[Value]:
    """Values from outside that the bodies of a node read."""
    found: dict[Value, None] = {}
    for body in node.bodies:
        made = set(node.carried)
        for inner in body.nodes:
            for value in (*inner.inputs, *captured(inner)):
                if value not in made:
                    found[value] = None
            made.update(inner.outputs)
        found.update((v, None) for v in body.outputs if v not in made)
    return list(found)
