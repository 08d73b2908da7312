"""Random groups of eight replicas, and collectives over them, against numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import popxl
from popxl import ops
from popxl.ops import collectives
from tests.popxl.programs import store
from tests.properties.settings import FAST, SLOW

REPLICAS = 8
SHAPES = ((8,), (8, 3), (2, 8), (3, 5))
REDUCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "add": lambda xs: xs.sum(0),
    "mean": lambda xs: xs.mean(0),
    "mul": lambda xs: xs.prod(0),
    "min": lambda xs: xs.min(0),
    "max": lambda xs: xs.max(0),
    "square_add": lambda xs: (xs**2).sum(0),
}
KINDS = (
    "all_reduce",
    "all_reduce_",
    "reduce_scatter",
    "gather",
    "stack",
    "shard",
    "slice",
    "rts",
)


@dataclass(frozen=True)
class Case:
    """One collective.

    Attributes:
        assignment: group of each replica.
        shape: of the tensor on each replica.
        kind: one of KINDS.
        reduction, axis: for the kinds that take one.
    """

    assignment: tuple[int, ...]
    shape: tuple[int, ...]
    kind: str
    reduction: str
    axis: int


@st.composite
def cases(draw: Any, collectives: bool = True) -> Case:
    """A case. Groups of collectives have a stride; those of variables need not."""
    size = draw(st.sampled_from([1, 2, 4, 8]))
    stride = draw(st.sampled_from([s for s in (1, 2, 4) if s * size <= REPLICAS or size == 1]))
    assignment = popxl.Ir(REPLICAS).replica_grouping(stride, size).assignment
    if not collectives:
        shuffled = draw(st.permutations(assignment))
        assignment = [list(dict.fromkeys(shuffled)).index(group) for group in shuffled]
    shape = draw(st.sampled_from(SHAPES))
    axis = draw(st.integers(0, len(shape) - 1))
    kind, reduction = draw(st.sampled_from(KINDS)), draw(st.sampled_from(sorted(REDUCTIONS)))
    if kind == "slice" and shape[axis] % size:
        kind = "gather"
    return Case(tuple(assignment), shape, kind, reduction, axis)


def write(case: Case, x: popxl.Tensor) -> popxl.Tensor:
    """The collective in popxl."""
    group = popxl.gir().replica_grouping_from_assignments(list(case.assignment))
    if case.kind == "all_reduce":
        return collectives.replicated_all_reduce(x, case.reduction, group)
    if case.kind == "all_reduce_":
        owner = ops.identity(x)
        collectives.replicated_all_reduce_(owner.flatten_(), case.reduction, group)
        return owner
    if case.kind == "reduce_scatter":
        return collectives.replicated_reduce_scatter(x, case.reduction, group)
    if case.kind == "gather":
        return collectives.replicated_all_gather(x, case.axis, group)
    if case.kind == "stack":
        return collectives.replicated_all_gather(x, case.axis, group, output_shape="new_axis")
    if case.kind == "shard":
        return collectives.replica_sharded_slice(x, group)
    if case.kind == "slice":
        return collectives.replicated_slice(x, case.axis, group)
    shard = collectives.replicated_reduce_scatter(x, case.reduction, group, True)
    return collectives.replicated_all_gather(shard * 2, group=group)


def reference(case: Case, x: np.ndarray) -> np.ndarray:
    """The collective in numpy: `x` and the result have a leading axis of replicas."""
    assignment = np.array(case.assignment)
    out = []
    for replica in range(REPLICAS):
        members = np.flatnonzero(assignment == assignment[replica])
        rank = int(np.flatnonzero(members == replica)[0])
        out.append(one_replica(case, x[members], rank))
    return np.stack(out)


def one_replica(case: Case, xs: np.ndarray, rank: int) -> np.ndarray:
    """Result on the replica that is number `rank` of the group with values `xs`."""
    size = len(xs)
    reduced = REDUCTIONS[case.reduction](xs)
    if case.kind.startswith("all_reduce"):
        return reduced
    if case.kind == "rts":
        return reduced * 2
    if case.kind == "gather":
        return np.concatenate(list(xs), case.axis)
    if case.kind == "stack":
        return np.stack(list(xs), case.axis)
    if case.kind == "slice":
        own = np.split(xs[rank], size, case.axis)[rank]
        return own.squeeze(case.axis) if own.shape[case.axis] == 1 else own
    flat = (reduced if case.kind == "reduce_scatter" else xs[rank]).ravel()
    length = -(-flat.size // size)
    return np.pad(flat, (0, length * size - flat.size))[rank * length : (rank + 1) * length]


def check(chosen: list[Case]) -> None:
    rng = np.random.default_rng(0)
    data = [rng.uniform(0.5, 1.5, (REPLICAS, *case.shape)).astype(np.float32) for case in chosen]
    ir = popxl.Ir(replication=REPLICAS)
    with ir.main_graph:
        loads = [popxl.h2d_stream(case.shape, popxl.float32) for case in chosen]
        results = [
            store(write(case, ops.host_load(stream)))
            for case, stream in zip(chosen, loads, strict=True)
        ]
    with popxl.Session(ir) as session:
        outputs = session.run(dict(zip(loads, data, strict=True)))
    for case, x, stream in zip(chosen, data, results, strict=True):
        expected = reference(case, x.astype(np.float64))
        np.testing.assert_allclose(outputs[stream], expected, rtol=1e-5, err_msg=str(case))


@FAST
@given(st.lists(cases(), min_size=12, max_size=12))
def test_random_groups(chosen: list[Case]) -> None:
    check(chosen)


@pytest.mark.slow
@SLOW
@given(st.lists(cases(), min_size=12, max_size=12))
def test_many_random_groups(chosen: list[Case]) -> None:
    check(chosen)


@FAST
@given(st.lists(cases(collectives=False), min_size=6, max_size=6))
def test_variables_of_random_groups(chosen: list[Case]) -> None:
    """Each replica starts from its group's data; what it holds at the end is read back."""
    ir = popxl.Ir(replication=REPLICAS)
    rng = np.random.default_rng(0)
    variables, before = [], []
    with ir.main_graph:
        for case in chosen:
            group = ir.replica_grouping_from_assignments(list(case.assignment))
            leading = (group.num_groups,) if group.num_groups > 1 else ()
            data = rng.normal(size=(*leading, *case.shape)).astype(np.float32)
            before.append(data)
            variables.append(popxl.variable(data, replica_grouping=group))
            ops.add_(variables[-1], popxl.constant(np.ones(case.shape, np.float32)))
        streams = [store(v) for v in variables]
    with popxl.Session(ir) as session:
        outputs = session.run()
    for case, variable, stream, data in zip(chosen, variables, streams, before, strict=True):
        np.testing.assert_allclose(session.get_tensor_data(variable), data + 1, rtol=1e-6)
        by_group = data.reshape(-1, *case.shape)
        np.testing.assert_allclose(outputs[stream], by_group[list(case.assignment)] + 1, rtol=1e-6)
