"""`emit`: creates an op and adds it to the current graph; the only way to make one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from popxl import context
from popxl._analysis.reference_overlap import check_reference_overlap
from popxl._analysis.shape_inference import infer_specs
from popxl._ir.op import Op, add_outputs
from popxl._ir.op_registry import OpDef
from popxl.graph import Graph
from popxl.ops._args import check_tensors
from popxl.tensor import Tensor


def emit(
    defn: OpDef,
    inputs: Iterable[Tensor],
    attrs: Mapping[str, Any] | None = None,
    *,
    names: Sequence[str] = (),
    inplace: int | None = None,
    view: bool = False,
) -> tuple[Tensor, ...]:
    """Creates an op, adds it to the current graph and returns its output tensors.

    Args:
        names: names of the outputs; default: as the definition says.
        inplace: index of the input to overwrite; output 0 then aliases it.
        view: make output 0 a view of the inputs.

    Raises:
        ValueError: an input belongs to another graph, or the inputs have different placements.
        SpecError: shapes or dtypes do not fit.
    """
    graph = context.get_current_graph()
    inputs = list(inputs)
    check_in_graph(graph, inputs, defn.name)
    if len(inputs) > 1 and defn.regions is None:  # what calls a graph takes inputs from anywhere
        check_placement({f"input {i}": t for i, t in enumerate(inputs)}, defn.name)
    op = Op(defn, graph, inputs, attrs or {}, inplace, view)
    specs = infer_specs(op)
    check_reference_overlap(op)
    add_outputs(op, specs, names)
    graph._append_op(op)
    return tuple(op.outputs)


def check_in_graph(graph: Graph, tensors: Iterable[Tensor], op_name: str) -> None:
    """Raises ValueError unless all `tensors` belong to `graph`."""
    for t in tensors:
        check_tensors(op_name, t)
        if t._graph.ir is not graph.ir:
            raise ValueError(
                f"{op_name} at {context.get_source_location()}: tensor {t.id!r} belongs to another "
                f"Ir ({t._graph.ir!r}) than graph {graph.id!r} ({graph.ir!r}): make a variable or "
                "a constant of its value in this one"
            )
        if t._graph is not graph:
            raise ValueError(
                f"tensor {t.id!r} belongs to graph {t._graph.id!r}, but {op_name} was called in "
                f"graph {graph.id!r} at {context.get_source_location()}: pass it as an input of "
                "that graph"
            )


def check_placement(tensors: Mapping[str, Tensor], op_name: str) -> None:
    """Raises ValueError if tensors are known to be on different IPUs or tile sets.

    Args:
        tensors: by the name of the argument; those of unknown place are skipped.
        op_name: name of the op.
    """
    if op_name != "ipu_copy":
        ipus = {name: t._ipu for name, t in tensors.items()}
        _check_same_location(tensors, ipus, op_name, "on IPU", "copy one with `copy_to_ipu` first")
    if op_name != "io_tile_copy":
        sets = {name: t._tile_set for name, t in tensors.items()}
        _check_same_location(tensors, sets, op_name, "in tile set", "use ops.io_tile_copy first")


def _check_same_location(
    tensors: Mapping[str, Tensor],
    places: Mapping[str, Any],
    op_name: str,
    location_phrase: str,
    advice: str,
) -> None:
    known = [(name, place) for name, place in places.items() if place is not None]
    for name, place in known[1:]:
        first, expected = known[0]
        if place != expected:
            raise ValueError(
                f"{op_name} at {context.get_source_location()}: {first} ({tensors[first].id!r}) is "
                f"{location_phrase} {expected}, but {name} ({tensors[name].id!r}) is "
                f"{location_phrase} {place}: {advice}"
            )
