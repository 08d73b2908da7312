"""A long loop whose iterations are alike: few of them are simulated, and the run is the same."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from planning.hardware.machines import machine
from planning.requirements import generation_requirements
from popxl import ops
from popxl.plan import loop_extrapolation
from popxl.plan.loop_extrapolation import measure_extrapolated
from tests.planning.presets import preset

POSITIONS = 20


@pytest.fixture(scope="module")
def generation() -> popxl.plan.TracedProgram:
    """Generation that passes the layers' weights for each token, some entries on the device."""
    config = preset(
        "qwen3_tiny",
        "inference",
        model={"output_length": POSITIONS, "num_hidden_layers": 3},
        generation={"weights": "streamed"},
        execution={"micro_batch_size": 1, "device": "gpu"},
    )
    traced = generation_requirements(config, "gpu 9.0").traced
    for buffer in traced.ir.remote_buffers:
        buffer.resident = buffer.entries // 2
    return traced


@pytest.mark.parametrize("link", [1e6, 64e9])
def test_a_long_run_follows_from_a_short_one(
    generation: popxl.plan.TracedProgram, link: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = machine("h100").rates("bfloat16", 1)
    rates = type(rates)(**{**vars(rates), "host_link": link, "both_ways": None})
    short, plan = generation.timeline(rates), generation.plan()
    monkeypatch.setattr(loop_extrapolation, "_LONG", 10**9)
    whole, whole_plan = generation.timeline(rates), generation.plan()
    assert len(short.spans) < 0.5 * len(whole.spans)
    assert short.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert short.compute_seconds == pytest.approx(whole.compute_seconds, rel=1e-9)
    assert short.exposed_transfers == pytest.approx(whole.exposed_transfers, rel=5e-3, abs=1e-6)
    assert short.exposed.keys() == whole.exposed.keys()
    assert short.peak == whole.peak
    assert plan == whole_plan


@pytest.mark.parametrize("follows", [False, True])
def test_iterations_that_move_other_entries_are_all_looked_at(follows: bool) -> None:
    """Where the index follows from the number of the iteration, whatever it passes through."""
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((4,), popxl.float32, 40)
        variables = [
            popxl.remote_variable(np.zeros(4, np.float32), buffer, row) for row in range(40)
        ]
        assert len(variables) == 40

        def inner(row: popxl.Tensor) -> popxl.Tensor:
            value = ops.remote_load(buffer, row)
            ops.remote_store(buffer, row, value + 1)
            return row

        def body(row: popxl.Tensor) -> popxl.Tensor:
            at = row + 0 if follows else popxl.constant(3, popxl.uint32)
            ops.call(ir.create_graph(inner, at), at)
            return row + 1

        first = popxl.constant(0, popxl.uint32)
        ops.repeat(ir.create_graph(body, first), 20, first)
    found = measure_extrapolated(
        popxl.plan.trace_program(ir).schedule, lambda schedule: schedule, 2, 4
    )
    counts = [schedule.main.steps[-1].count for schedule in found[:2]]  # type: ignore[attr-defined]
    assert (counts, found[2]) == (([20, 20], 0.0) if follows else ([2, 6], 3.5))
