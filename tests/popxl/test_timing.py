"""Timing of a session's runs, which does not change their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._schedule.segment import Segment
from popxl.errors import popart_exception
from tests.popxl.programs import store

pytestmark = pytest.mark.usefixtures("cached")
LAYERS, RUNS = 3, 2


def program() -> tuple[popxl.Session, popxl.DeviceToHostStream]:
    """Layers that load a weight and store it changed, in a loop, and a head on their result."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        buffer = popxl.remote_buffer((8, 8), popxl.float32, LAYERS)
        for i in range(LAYERS):
            popxl.remote_variable(np.eye(8, dtype=np.float32) * (i + 1), buffer, i)
        x = popxl.variable(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8))

        def layer(row: popxl.Tensor, x: popxl.Tensor) -> list[popxl.Tensor]:
            with popxl.plan.part("layer/forward"):
                w = ops.remote_load(buffer, row)
                y = ops.tanh(x @ w)
            with popxl.plan.part("layer/update"):
                ops.remote_store(buffer, row, w * 0.5 + y)
            return [row + 1, y]

        first = popxl.constant(0, popxl.int32)
        _, y = ops.repeat(ir.create_graph(layer, first, x), LAYERS, first, x)
        with popxl.plan.part("head"):
            out = popxl.d2h_stream((), popxl.float32)
            ops.host_store(out, ops.sum(y))
    return popxl.Session(ir, "cpu"), out


def timed(apart: bool) -> tuple[list[np.ndarray], popxl.timing.Timing]:
    session, out = program()
    with session, session.timing(apart) as timing:
        results = [session.run()[out] for _ in range(RUNS)]
    with session:
        session.run()  # is not measured any more
    return results, timing


@pytest.mark.parametrize("apart", [False, True])
def test_every_step_of_the_schedule_counts_for_its_part(apart):
    results, timing = timed(apart)
    session, out = program()
    with session:
        assert np.array_equal(results, [session.run()[out] for _ in range(RUNS)])
    assert timing.num_runs == RUNS
    counts = {
        name: (p.loads.count, p.runs.count, p.stores.count) for name, p in timing.parts.items()
    }
    each = LAYERS * RUNS
    assert sum(c[0] for c in counts.values()) == each
    assert sum(c[2] for c in counts.values()) == each
    assert counts["layer/forward"][0] == counts["layer/update"][2] == each
    assert counts["head"] == (0, RUNS, 0)
    assert sum(c[1] for c in counts.values()) == sum(w.count for w in timing.segments.values())
    within = sum(p.seconds + p.wait_seconds for p in timing.parts.values())
    assert 0 < within <= timing.seconds


def test_apart_a_segment_has_the_time_of_its_work():
    """Dispatching takes a time that does not depend on the size of a product; with `synchronize`
    the time does."""
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.ones((800, 800), np.float32))
        with popxl.plan.part("large"):
            y = x
            for _ in range(4):
                y = y @ x
            out = popxl.d2h_stream((), popxl.float32)
            ops.host_store(out, ops.sum(y))
    flops = 4 * 2 * 800**3
    shares = []
    with popxl.Session(ir, "cpu") as session:
        session.run()
        for _ in range(5):  # other processes may take some of the time
            with session.timing(synchronize=True) as timing:
                session.run()
            seconds = timing.parts["large"].runs.seconds
            assert seconds > flops / 20e12  # no CPU is faster
            shares.append(seconds / timing.seconds)
    assert max(shares) > 0.5


def test_a_session_is_measured_once_at_a_time(ir):
    store(ops.identity(popxl.variable(1.0)))
    with popxl.Session(ir) as session, session.timing() as timing:
        with pytest.raises(popart_exception, match="measured already"), session.timing():
            pass
        session.run()
    assert timing.num_runs == 1


def test_steps_are_logged_before_they_are_done_when_asked(monkeypatch, capfd):
    """The last line is the step that a hung run waits for."""
    session, _ = program()
    with session:
        session.run()
        assert "popxl:" not in capfd.readouterr().err
        monkeypatch.setenv("POPXL_STEPS", "1")
        seen: list[str] = []
        call = session._program._call_segment

        def hangs(segment: Segment, arguments: Sequence[Any]) -> Sequence[Any]:
            seen.append(capfd.readouterr().err)
            return call(segment, arguments)

        monkeypatch.setattr(session._program, "_call_segment", hangs)
        session.run()
    lines = [line.partition(" s: ")[2] for line in "".join(seen).splitlines()]
    loads = [line for line in lines if " load " in line]
    assert [line.split("[")[1].split("]")[0] for line in loads] == ["0", "1", "2"]
    assert all("# layer/forward" in line for line in loads)
    assert any(f"{LAYERS} times " in line for line in lines)
    for text in seen:
        assert " run " in text.splitlines()[-1]
    assert "waits for the devices" in capfd.readouterr().err.splitlines()[-1]
