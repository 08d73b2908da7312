"""IR verifier: tests run it after each transform, sessions with POPXL_VERIFY=1."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from popxl._analysis.functionalization import functionalize
from popxl._analysis.reference_overlap import check_reference_overlap
from popxl._analysis.shape_inference import infer_specs
from popxl._ir.debug_flags import VERIFY, is_debug_flag_set
from popxl._ir.regions import Region, regions
from popxl._ir.sharding import shard_elements
from popxl.errors import popart_exception
from popxl.replica_grouping import ReplicaGrouping

if TYPE_CHECKING:
    from popxl._ir.op import Op
    from popxl.graph import Graph
    from popxl.ir import Ir
    from popxl.tensor import Tensor


class VerificationError(popart_exception):
    """A graph violates an invariant of the IR; the message shows the op."""


_64_BIT_DTYPES = ("int64", "uint64", "float64", "complex128")


def verify_if_enabled(ir: Ir) -> None:
    """Verifies all graphs of a program if the environment variable POPXL_VERIFY is set."""
    if is_debug_flag_set(VERIFY):
        verify_ir(ir)


def verify_ir(ir: Ir) -> None:
    """Checks the invariants of all graphs of `ir`; raises VerificationError."""
    for graph in ir._graphs:
        verify_graph(graph)


def verify_graph(graph: Graph) -> None:
    """Checks the invariants of one graph; raises VerificationError.

    Each tensor is bound once and before its use, specs are as inferred, calls match the graphs they
    call.

    Raises:
        VerificationError: with the text of the offending op.
    """
    defined: set[Tensor] = set(graph._inputs)
    defined.update((*graph._device_tensors, *graph.variables, *graph.constants))
    for op in graph._ops:
        _check_invariant(op.graph is graph, op, "is listed in another graph")
        for t in op.inputs:
            _check_invariant(t in defined, op, f"uses %{t.name} before it is defined")
        for t in op.outputs:
            _check_invariant(t not in defined, op, f"defines %{t.name} a second time")
            _check_invariant(t._producer is op, op, f"is not the recorded producer of %{t.name}")
            defined.add(t)
        _check_invariant(
            op.inplace is None or 0 <= op.inplace < len(op.inputs),
            op,
            f"overwrites its input {op.inplace}, which it does not have",
        )
        _check_invariant(
            not op.view or op.defn.view_write is not None,
            op,
            "is a view, but has no rule to write through",
        )
        for region in regions(op):
            if region.kind != "derivative":
                _check_region(op, region)
        got, want = _recorded_specs(op), _inferred_specs(op)
        _check_invariant(got == want, op, f"has outputs {got}, but its inputs give {want}")
    for t in graph._outputs:
        if t not in defined:
            raise VerificationError(f"graph {graph.id!r} returns %{t.name}, which nothing defines")


def check_replicas(ir: Ir) -> None:
    """Checks that the replica groupings of variables and ops fit the Ir's replication factor.

    Raises:
        ValueError: the replication factor was changed after it was used.
    """
    count = ir.replication_factor
    for var in ir.main_graph.variables:
        _check_grouping(var._grouping, f"variable {var.id!r}", count)
    for graph in ir._graphs:
        for op in graph._ops:
            groupings = [v for v in op.attrs.values() if isinstance(v, ReplicaGrouping)]
            for grouping in groupings:
                _check_grouping(grouping, f"{op.name} at {op.location}", count)
            if groupings and _inferred_specs(op) != _recorded_specs(op):
                raise ValueError(
                    f"{op.name} at {op.location} was written for another number of replicas than "
                    f"{count}, on which its shape depends: set ir.replication_factor before"
                )


def check_calls(ir: Ir) -> None:
    """Checks all calls again, since callees can have changed after the call.

    See `check_reference_overlap`.

    Raises:
        ValueError: as it does.
    """
    for graph in ir._graphs:
        for op in graph._ops:
            if op.called_graphs():
                check_reference_overlap(op)


def check_transfer_counts(ir: Ir) -> None:
    """Checks that a run uses each stream at most `ir.num_host_transfers` times.

    Raises:
        popart_exception: one is used more often than `ir.num_host_transfers`.
    """
    for stream, n in functionalize(ir.main_graph).transfer_counts.items():
        if n > ir.num_host_transfers:
            raise popart_exception(
                f"stream {stream.tensor_id!r} is used {n} times in a run, but "
                f"ir.num_host_transfers is {ir.num_host_transfers}: set it to {n}"
            )


def check_remote_variables(ir: Ir) -> None:
    """Checks that the entries of remote buffers have the sizes of the variables in them.

    Raises:
        ValueError: the number of elements of an entry differs from the variable's or its shard's.
    """
    for var in ir.main_graph.variables:
        if var._remote is None:
            continue
        buffer, offset = var._remote
        elements = shard_elements(var.shape, var._num_shards)
        if math.prod(buffer.tensor_shape) != elements:
            raise ValueError(
                f"variable {var.id!r} needs {elements} elements in each replica, but entry "
                f"{offset} of {buffer!r} has another number"
            )


def check_no_64_bit_types(ir: Ir) -> None:
    """Checks that no variable and no tensor has 64-bit elements.

    Raises:
        popart_exception: one has; devices compute with 32 bits, and would change its values.
    """
    for graph in ir._graphs:
        used = (t for op in graph._ops for t in (*op.inputs, *op.outputs))
        for t in (*graph.variables, *used):
            if t.dtype.name in _64_BIT_DTYPES:
                location = "" if t._producer is None else f" at {t._producer.location}"
                raise popart_exception(
                    f"{t.id!r}{location} is {t.dtype.name}, but devices have no elements of 64 "
                    "bits: leave `downcast` at True, or name a dtype of 32 bits"
                )


def _check_grouping(grouping: ReplicaGrouping, owner_name: str, count: int) -> None:
    grouping_size = len(grouping.assignment)
    if grouping_size != count:
        raise ValueError(
            f"the grouping of {owner_name} is for {grouping_size} replicas, but the Ir has "
            f"{count}: set ir.replication_factor before making groupings"
        )


def _recorded_specs(op: Op) -> list[Any]:
    return [(t.shape, t.dtype) for t in op.outputs]


def _inferred_specs(op: Op) -> list[Any]:
    return [(s.shape, s.dtype) for s in infer_specs(op)]


def _check_region(op: Op, region: Region[Graph]) -> None:
    callee = region.graph
    last = max((i for i in region.inputs if i is not None), default=-1)
    _check_invariant(last < len(op.inputs), op, f"passes too little to @{callee.id}")
    args = [op.inputs[region.op_input_index(i)] for i in range(len(region.inputs))]
    _check_specs_match(op, callee, "passes", "takes", callee._inputs, args)
    results = [op.outputs[i] for i in region.outputs if i is not None]
    _check_specs_match(op, callee, "returns", "returns", callee._outputs, results)


def _check_specs_match(
    op: Op,
    callee: Graph,
    caller_verb: str,
    callee_verb: str,
    expected: list[Tensor],
    actual: list[Tensor],
) -> None:
    got = [(t.shape, t.dtype) for t in actual]
    want = [(t.shape, t.dtype) for t in expected]
    _check_invariant(got == want, op, f"{caller_verb} {got}, but @{callee.id} {callee_verb} {want}")


def _check_invariant(ok: bool, op: Op, problem: str) -> None:
    if not ok:
        raise VerificationError(f"graph {op.graph.id!r}: `{op}` ({op.location}) {problem}")
