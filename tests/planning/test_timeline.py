"""The simulated run: it agrees with the walker on a device whose streams are threads, shows what
windows hide, and keeps the memory that the plan counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import popxl
from modelling.phases.training import build_training
from modelling.spec import family_of
from popxl._lower.lookahead import window_of
from popxl.plan.simulated import drive
from tests.planning.test_against_references import preset
from tests.popxl.threads import ThreadDevice

COMPUTING = 1.0  # seconds of a step
TOLERANCE = 0.05
PASSES = ("forward", "backward", "update")
FAMILIES = {"tiny": {"layers": 3}, "gptj_tiny": {"layers": 3}}


@cache
def traced(name: str) -> popxl.plan.Traced:
    """A small model, a step of which has a few layers and micro-batches."""
    config = preset(
        name,
        model=FAMILIES[name],
        training={"global_batch_size": 2},
        execution={"micro_batch_size": 1},
    )
    table = family_of(config).weights(config)
    return popxl.plan.trace(build_training(config, family_of(config).layout, table=table).ir)


def rates(program: popxl.plan.Traced) -> popxl.plan.Rates:
    """Of a machine on which the loads of a step take nearly as long as its compute."""
    plan = program.plan()
    flops = plan.flops / COMPUTING
    return popxl.plan.Rates(
        flops=flops,
        float8_flops=flops,
        bandwidth=sum(part.device_traffic for part in plan.parts) / (0.2 * COMPUTING),
        host_link=sum(part.host_to_device for part in plan.parts) / (0.8 * COMPUTING),
        link=1e30,
        network=1e30,
        **dict.fromkeys(("copy", "run", "put", "put_array"), 0.0),
    )


def makespans(ends: Mapping[str, float]) -> dict[str, float]:
    """Seconds of the passes, from when each part of the program is over."""
    last = [max(end for part, end in ends.items() if part.endswith(name)) for name in PASSES]
    return dict(zip(PASSES, np.diff(last, prepend=0.0).tolist(), strict=True))


def simulated(program: popxl.plan.Traced, window: int) -> dict[str, float]:
    spans = program.timeline(rates(program), window).spans
    return makespans({span.part: span.end for span in spans if span.stream == "compute"})


def walked(program: popxl.plan.Traced, window: int) -> dict[str, float]:
    """The walker drives threads."""
    machine = rates(program)

    def seconds(segment: Any) -> float:
        return sum(map(machine.seconds, program.works[segment].parts.values()))

    with ThreadDevice(machine, seconds) as device:
        drive(program.schedule, device, window)
    return makespans(device.ends)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_walker_and_simulation_agree(name: str, layers: int) -> None:
    """The machine may be busy with something else: the best of three counts."""
    program = traced(name)
    window = window_of(program.schedule) * layers // 2
    expected, differ = simulated(program, window), 1.0
    for _ in range(3):
        found = walked(program, window)
        differ = min(differ, max(abs(found[name] / expected[name] - 1) for name in PASSES))
        if differ < TOLERANCE:
            return
    pytest.fail(f"{found} and {expected} differ by {differ:.1%}")


@pytest.mark.parametrize("name", FAMILIES)
def test_loads_in_their_place_overlap_nothing(name: str) -> None:
    """With a window of 0 the forward pass takes its loads and its compute one after the other; with
    two layers it hides what transfers it can."""
    program = traced(name)
    places, ahead = (program.timeline(rates(program), window) for window in (0, None))
    assert places.computing == pytest.approx(ahead.computing)
    assert places.exposed_transfers > 1.2 * ahead.exposed_transfers
    both = places.computing + sum(
        span.end - span.start for span in places.spans if span.stream == "copies in"
    )
    assert places.seconds > 0.95 * both


@pytest.mark.parametrize("name", FAMILIES)
def test_memory_is_what_the_plan_counts_where_nothing_is_on_its_way(name: str) -> None:
    program = traced(name)
    at_once = dict.fromkeys(("flops", "float8_flops", "bandwidth", "host_link"), 1e40)
    machine = replace(rates(program), **at_once, run=1e-3, put=1e-3)
    found = program.timeline(machine, window=0)
    assert found.peak == program.plan().temporaries
    assert program.timeline(machine).peak <= found.peak + found.window + window_of(program.schedule)


def test_the_trace_has_a_row_for_each_stream_and_all_that_moves() -> None:
    program = traced("gptj_tiny")
    made = program.timeline(rates(program))
    events = json.loads(json.dumps(made.trace()))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert set(names.values()) == {"compute", "copies in", "copies out", "disk", "host"}
    loads = [e for e in events if e["ph"] == "X" and names[e["tid"]] == "copies in"]
    ops = Counter[str]()
    for part in program.plan().parts:
        ops.update(part.ops)
    assert len(loads) == ops["remote_load"]
    assert max(e["ts"] + e["dur"] for e in loads) <= 1e6 * made.seconds
