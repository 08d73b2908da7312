"""Random programs with calls, loops, branches, views and changes in place, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import popxl
from popxl import ops
from tests.properties.language import Body, bodies
from tests.properties.meanings import Memory, run_numpy, write_popxl

FAST = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=4,
    phases=[Phase.generate],  # shrinking compiles many programs: minutes, for the slow ones only
    suppress_health_check=list(HealthCheck),
)
SLOW = settings(FAST, max_examples=100, phases=[Phase.generate, Phase.shrink])


def inputs_of(body: Body, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in body.inputs]


def store(t: popxl.Tensor) -> popxl.DeviceToHostStream:
    stream = popxl.d2h_stream(t.shape, t.dtype)
    ops.host_store(stream, t)
    return stream


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
