"""Random programs with calls, loops, branches, views and changes in place, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import popxl
from tests.popxl.programs import store
from tests.properties.language import Body, bodies
from tests.properties.meanings import Memory, run_numpy, write_popxl
from tests.properties.settings import FAST, SLOW, inputs_of


def check(programs: list[Body]) -> None:
    """Compare all tensors of all programs, and what is left in their variables; run by run, the
    second of which begins with what the first has left, and may take other branches."""
    data = [inputs_of(body, seed) for seed, body in enumerate(programs)]
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        variables = [[popxl.variable(x) for x in inputs] for inputs in data]
        written = [write_popxl(b, v) for b, v in zip(programs, variables, strict=True)]
        streams = [[store(t) for t in tensors] for tensors in written]
    memories = [Memory() for _ in programs]
    storages = [[m.new(x) for x in inputs] for m, inputs in zip(memories, data, strict=True)]
    with popxl.Session(ir) as session:
        for run in range(2):
            outputs = session.run()
            every = zip(programs, memories, storages, streams, variables, strict=True)
            for body, memory, storage, found, own in every:
                tensors = run_numpy(memory, body, storage)
                pairs = [(outputs[s], t) for s, t in zip(found, tensors, strict=True)]
                left = map(session.read_variable_data, own)
                for i, (ours, t) in enumerate([*pairs, *zip(left, storage, strict=True)]):
                    np.testing.assert_allclose(
                        ours, memory.numbers[t], rtol=2e-4, atol=2e-4,
                        err_msg=f"run {run}, tensor {i}",
                    )  # fmt: skip


PROGRAMS = st.lists(bodies(steps=12), min_size=4, max_size=4)


@FAST
@given(PROGRAMS)
def test_random_programs(programs: list[Body]) -> None:
    check(programs)


@pytest.mark.slow
@SLOW
@given(PROGRAMS)
def test_many_random_programs(programs: list[Body]) -> None:
    check(programs)
