"""`Op`: a node of a graph, created by `popxl.ops._emit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from popxl import context, dtypes
from popxl._ir.analysis_registry import analyses
from popxl._ir.op_registry import OpDef
from popxl._ir.regions import regions

if TYPE_CHECKING:
    from popxl.graph import Graph
    from popxl.tensor import Tensor


_ROUNDED = (dtypes.float16, dtypes.bfloat16)


class Op:
    """An instance of an `OpDef` in a graph.

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
        self.site_modified: set[int] = set()  # inputs marked as modified at this call site
        self.location = context.get_source_location()
        self.ipu = ctx.ipu_id
        self.io = ctx.io_tile_set
        self.in_sequence = ctx.in_sequence
        self.part = ctx.part

    @property
    def name(self) -> str:
        """Op name for printing; names of in-place ops and views end in `_`."""
        return self.defn.name + ("_" if self.inplace is not None or self.view else "")

    @property
    def can_round_stochastically(self) -> bool:
        """True if the op rounds a float32 update stochastically to its variable's 16-bit type.

        With the session option `enableStochasticRounding` that is at random. Every such update of a
        run has a number, the same on all replicas; with the seed of the run it selects a stream of
        random bits. Numbers are known before anything runs (a loop takes as many in each
        iteration), so loops carry nothing, and branches that replicas take differently leave them
        at the same number.
        """
        return self.defn.rounds and self.inputs[0].dtype in _ROUNDED

    def modified_inputs(self) -> set[int]:
        """Returns the indices of the inputs whose values the op changes."""
        modified = set() if self.inplace is None else {self.inplace}
        for region in regions(self):
            modified.update(map(region.op_input_index, analyses.modified_call_inputs(self, region)))
        return modified

    def called_graphs(self) -> tuple[Graph, ...]:
        """Returns the graphs that the op runs, such as branches or a loop's body."""
        graphs = (r.graph for r in regions(self) if r.kind != "derivative")
        return tuple(dict.fromkeys(graphs))

    def __str__(self) -> str:
        return analyses.format_op(self)

    def __repr__(self) -> str:
        return f"<Op {self.name} at {self.location}>"


def add_outputs(op: Op, specs: Sequence[Any], names: Sequence[str] = ()) -> list[Tensor]:
    """Adds output tensors to `op`, named by `names` or else by its definition."""
    from popxl.tensor import Tensor

    added = []
    for spec, name in zip(specs, names or op.defn.result_names(op, len(specs)), strict=True):
        tensor = Tensor._make(op.graph, spec, name, producer=op)
        op.outputs.append(tensor)
        added.append(tensor)
    return added
