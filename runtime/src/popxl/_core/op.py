"""`Op`: one node of a graph, and `emit`, the only way to make one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from popxl import context, dtypes
from popxl._core.infer import infer_specs
from popxl._core.opdef import OpDef
from popxl._core.references import changed_inputs, check_references
from popxl._core.regions import regions

if TYPE_CHECKING:
    from popxl.graph import Graph
    from popxl.tensor import Tensor


_ROUNDED = (dtypes.float16, dtypes.bfloat16)


class Op:
    """A use of an `OpDef` in a graph.

    Attributes:
        defn: the definition.
        graph: the graph it belongs to.
        inputs, outputs: its tensors.
        attrs: keyword arguments of the definition's rules; values must be hashable.
        inplace: index of the input that the result overwrites, or None. Output 0 aliases it.
        view: whether output 0 is a view of the inputs (reads and writes go through to them).
        location: `file:line` of the user's code.
        ipu, io, in_sequence: placement and ordering hints at creation.
        part: label of the part of the program it belongs to in plans; "": that of the caller.
    """

    __slots__ = (
        "attrs", "defn", "graph", "in_sequence", "inplace", "inputs", "io", "ipu", "location",
        "outputs", "part", "site_modified", "view",
    )  # fmt: skip

    def __init__(
        self,
        defn: OpDef,
        graph: Graph,
        inputs: Sequence[Tensor],
        attrs: Mapping[str, Any],
        inplace: int | None = None,
        view: bool = False,
    ) -> None:
        ctx = context.get_current_context()
        self.defn, self.graph = defn, graph
        self.inputs: list[Tensor] = list(inputs)
        self.outputs: list[Tensor] = []
        self.attrs = dict(attrs)
        self.inplace, self.view = inplace, view
        self.site_modified: set[int] = set()  # inputs a call site was told it modifies
        self.location = context.get_source_location()
        self.ipu = ctx.ipu_id
        self.io = ctx.io_tile_set
        self.in_sequence = ctx.in_sequence
        self.part = ctx.part

    @property
    def name(self) -> str:
        """Name as printed: in-place ops and views end in `_`."""
        return self.defn.name + ("_" if self.inplace is not None or self.view else "")

    @property
    def is_rounded(self) -> bool:
        """Whether it rounds a float32 value to the 16-bit type of the variable it updates.

        With the session option `enableStochasticRounding` that is at random. Every such update of a
        run has a number, the same on all replicas; with the seed of the run it selects a stream of
        random bits. Numbers are known before anything runs (a loop takes as many in each
        iteration), so loops carry nothing, and branches that replicas take differently leave them
        at the same number.
        """
        return self.defn.rounds and self.inputs[0].dtype in _ROUNDED

    def modified_inputs(self) -> set[int]:
        """Indices of the inputs whose value this op changes."""
        found = set() if self.inplace is None else {self.inplace}
        for region in regions(self):
            found.update(map(region.position, changed_inputs(self, region)))
        return found

    def called_graphs(self) -> tuple[Graph, ...]:
        """Graphs this op runs."""
        found = (r.graph for r in regions(self) if r.kind != "derivative")
        return tuple(dict.fromkeys(found))

    def __str__(self) -> str:
        from popxl._core.text import op_text

        return op_text(self)

    def __repr__(self) -> str:
        return f"<Op {self.name} at {self.location}>"


def emit(
    defn: OpDef,
    inputs: Iterable[Tensor],
    attrs: Mapping[str, Any] | None = None,
    *,
    names: Sequence[str | None] = (),
    inplace: int | None = None,
    view: bool = False,
) -> tuple[Tensor, ...]:
    """Add an op to the current graph and return its outputs.

    Args:
        names: names of the outputs; default `t`.
        inplace: index of the input to overwrite; output 0 then aliases it.
        view: make output 0 a view of the inputs.

    Raises:
        ValueError: an input belongs to another graph, or the inputs have different placements.
        SpecError: shapes or dtypes do not fit.
    """
    graph = context.get_current_graph()
    inputs = list(inputs)
    check_in_graph(graph, inputs, defn.name)
    if defn.regions is None:  # what calls a graph takes inputs from anywhere
        check_placement({f"input {i}": t for i, t in enumerate(inputs)}, defn.name)
    op = Op(defn, graph, inputs, attrs or {}, inplace, view)
    specs = infer_specs(op)
    check_references(op)
    add_outputs(op, specs, names)
    graph._append_op(op)
    return tuple(op.outputs)


def add_outputs(op: Op, specs: Sequence[Any], names: Sequence[str | None] = ()) -> list[Tensor]:
    """Give `op` further outputs of the given specs; returns them."""
    from popxl.tensor import Tensor

    added = []
    for i, spec in enumerate(specs):
        name = names[i] if i < len(names) else None
        tensor = Tensor._make(op.graph, spec, name, producer=op)
        op.outputs.append(tensor)
        added.append(tensor)
    return added


def check_in_graph(graph: Graph, tensors: Iterable[Tensor], what: str) -> None:
    """Raise ValueError unless all `tensors` belong to `graph`."""
    from popxl.tensor import Tensor

    for t in tensors:
        if not isinstance(t, Tensor):
            raise TypeError(
                f"{what} at {context.get_source_location()} takes tensors, but got {t!r} of type "
                f"{type(t).__name__}"
            )
        if t._graph is not graph:
            raise ValueError(
                f"tensor {t.id!r} belongs to graph {t._graph.id!r}, but {what} was called in "
                f"graph {graph.id!r} at {context.get_source_location()}: pass it as an input of "
                "that graph"
            )


def check_placement(tensors: Mapping[str, Tensor], what: str) -> None:
    """Raise ValueError if tensors are known to be on different IPUs or tile sets.

    Args:
        tensors: by the name of the argument; those of unknown place are skipped.
        what: name of the op.
    """
    if what != "ipu_copy":
        ipus = {name: t._ipu for name, t in tensors.items()}
        _check_alike(tensors, ipus, what, "on IPU", "copy one with `copy_to_ipu` first")
    if what != "io_tile_copy":
        sets = {name: t._tile_set for name, t in tensors.items()}
        _check_alike(tensors, sets, what, "in tile set", "use ops.io_tile_copy first")


def _check_alike(
    tensors: Mapping[str, Tensor], places: Mapping[str, Any], what: str, where: str, advice: str
) -> None:
    known = [(name, place) for name, place in places.items() if place is not None]
    for name, place in known[1:]:
        first, expected = known[0]
        if place != expected:
            raise ValueError(
                f"{what} at {context.get_source_location()}: {first} ({tensors[first].id!r}) is "
                f"{where} {expected}, but {name} ({tensors[name].id!r}) is {where} {place}: "
                f"{advice}"
            )
