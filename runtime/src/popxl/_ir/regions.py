"""Regions: the graphs that an op runs, with the mapping of inputs and outputs.

Everything that walks a program (effects, the functional form, plans, the verifier) walks regions;
nothing else has to know which ops run graphs, or how they name them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from popxl._ir.op import Op
    from popxl.graph import Graph
    from popxl.tensor import Tensor

G = TypeVar("G")  # a `Graph`, or a `FunctionalGraph`


@dataclass(frozen=True, eq=False)
class Region(Generic[G]):
    """A graph that an op runs (or a functional graph that a node runs), with its input mapping.

    Attributes:
        graph: the graph.
        inputs: for each input of the graph, the position among the op's inputs of the tensor that
            it is given; None: the op makes the value itself.
        outputs: for each output of the graph, its position among the op's outputs; None: dropped.
        carried: pairs of an output and the input that it is in the next iteration.
        count: number of iterations.
        kind: "always"; "branch": of all regions of this kind one runs, the first if the op's first
            input is true; "derivative": values reach the graph in ways that only the op knows, and
            it changes no state.
        extra_tensors: tensors of the graph whose values the op wants besides its outputs.
    """

    graph: G
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...] = ()
    carried: tuple[tuple[int, int], ...] = ()
    count: int = 1
    kind: Literal["always", "branch", "derivative"] = "always"
    extra_tensors: tuple[Tensor, ...] = ()

    def op_input_index(self, index: int) -> int:
        """Returns the index of the op's input that is passed as the graph's input `index`."""
        position = self.inputs[index]
        assert position is not None, f"input {index} of {self.graph!r} is given by the op itself"
        return position

    def writes_back(self: Region[Graph], op: Op, index: int) -> bool:
        """True if modifying the graph's input `index` also modifies the op's input tensor."""
        position = self.inputs[index]
        return position is not None and (
            self.graph._inputs[index]._by_ref or position in op.site_modified
        )


def regions(op: Op) -> tuple[Region[Graph], ...]:
    """Returns the graphs that `op` runs as regions (with input mappings), in execution order."""
    return () if op.defn.regions is None else tuple(op.defn.regions(op))
