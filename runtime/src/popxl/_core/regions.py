"""What an op that runs graphs runs, as data.

Everything that walks a program (effects, transfer counts, the schedule, plans, the verifier) walks
regions; nothing else has to know which ops run graphs, or how they name them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from popxl._core.op import Op
    from popxl.graph import Graph

T = TypeVar("T")


@dataclass(frozen=True)
class Region:
    """A graph that an op runs.

    Attributes:
        graph: the graph.
        inputs: for each input of the graph, the position among the op's inputs of the tensor that
            it is given; None: the op makes the value itself.
        outputs: for each output of the graph, its position among the op's outputs, or None.
        carried: how many outputs become the first inputs of the next iteration.
        count: how often it runs.
        kind: "always"; "branch": of all regions of this kind one runs; "derivative": values reach
            the graph in ways that only the op knows, and it changes no state.
    """

    graph: Graph
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...] = ()
    carried: int = 0
    count: int = 1
    kind: Literal["always", "branch", "derivative"] = "always"


def regions(op: Op) -> tuple[Region, ...]:
    """The regions of `op`, in the order in which they run."""
    return () if op.defn.regions is None else tuple(op.defn.regions(op))


def combine(
    op: Op,
    of: Callable[[Graph], T],
    zero: T,
    add: Callable[[T, T], T],
    times: Callable[[T, int], T],
    either: Callable[[T, T], T],
) -> T:
    """What the regions of `op` amount to together: iterations multiply, branches are alternatives.

    Args:
        of: what one execution of a graph amounts to.
        zero: what nothing amounts to.
        add, times, either: how amounts that follow each other, are repeated, or exclude each other
            combine.
    """
    total, branches = zero, zero
    for region in regions(op):
        amount = times(of(region.graph), region.count)
        if region.kind == "branch":
            branches = either(branches, amount)
        else:
            total = add(total, amount)
    return add(total, branches)
