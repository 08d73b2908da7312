"""The simulated run: it agrees with the walker on a device whose streams are threads, shows what
windows hide, and keeps the memory that the plan counts."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import popxl
from modelling.model_family import get_family
from modelling.phases.training import build_training_program
from planning.hardware.machines import machine
from planning.requirements import finetuning_requirements
from popxl._schedule.lookahead import default_prefetch_window
from popxl._schedule.schedule import Run
from popxl.plan.events import events_of_run
from popxl.plan.placement import MARGIN
from popxl.plan.simulated_device import SimulatedDevice, drive_device
from tests.planning.presets import preset
from tests.popxl.threads import ThreadDevice
from tests.slow import slow

COMPUTING = 1.0  # seconds of a step
TOLERANCE = 0.05
PASSES = {
    "end": (("forward",), ("backward",), ("update",)),
    "deferred": (("update", "forward"), ("backward",)),
}
FAMILIES = {"tiny": {"layers": 3}, "gptj_tiny": {"layers": 3}}


@cache
def traced(name: str, update: str = "end") -> popxl.plan.TracedProgram:
    """A small model, a step of which has a few layers and micro-batches."""
    config = preset(
        name,
        model=FAMILIES[name],
        training={"global_batch_size": 2},
        execution={"micro_batch_size": 1, "update": update},
    )
    weight_map = get_family(config).weight_map(config)
    return popxl.plan.trace_program(
        build_training_program(config, get_family(config).build_phases, weight_map=weight_map).ir
    )


_LATENCIES = (
    *("copy_latency_s", "dispatch_s", "kernel_launch_s"),
    *("transfer_dispatch_s", "per_array_s"),
)


def rates(program: popxl.plan.TracedProgram) -> popxl.plan.Rates:
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
        **dict.fromkeys(_LATENCIES, 0.0),
    )


def makespans(ends: Mapping[str, float], update: str) -> list[float]:
    """Seconds of the passes, from when each part of the program is over."""
    passes = PASSES[update]
    last = [max(end for part, end in ends.items() if part.endswith(names)) for names in passes]
    return np.diff(last, prepend=0.0).tolist()


def simulated(program: popxl.plan.TracedProgram, window: int) -> dict[str, float]:
    """When the parts of the program are over."""
    spans = program.timeline(rates(program), window).spans
    return {span.part: span.end for span in spans if span.stream == "compute"}


def walked(program: popxl.plan.TracedProgram, window: int) -> dict[str, float]:
    """The walker drives threads."""
    link = rates(program)

    def seconds(segment: Any) -> float:
        return program.segment_costs[segment].seconds(link)

    with ThreadDevice(link, seconds) as device:
        drive_device(program.schedule, device, window)
    return device.ends


@pytest.mark.parametrize(
    ("name", "layers", "update"),
    [
        *(("tiny", 0, "end"), slow("tiny", 1, "end"), ("tiny", 2, "end")),
        *(slow("gptj_tiny", layers, "end") for layers in (0, 1, 2)),
        slow("gptj_tiny", 0, "deferred"),
        ("gptj_tiny", 2, "deferred"),
    ],
)
def test_walker_and_simulation_agree(name: str, layers: int, update: str) -> None:
    """The machine may be busy with something else: the best of three counts."""
    program = traced(name, update)
    window = default_prefetch_window(program.schedule) * layers // 2
    expected, differ = makespans(simulated(program, window), update), 1.0
    for _ in range(3):
        found = makespans(walked(program, window), update)
        pairs = zip(found, expected, strict=True)
        differ = min(differ, max(abs(ours / theirs - 1) for ours, theirs in pairs))
        if differ < TOLERANCE:
            return
    pytest.fail(f"{found} and {expected} differ by {differ:.1%}")


@pytest.mark.parametrize("name", FAMILIES)
def test_loads_in_their_place_overlap_nothing(name: str) -> None:
    """With a window of 0 the forward pass takes its loads and its compute one after the other; with
    two layers it hides what transfers it can."""
    program = traced(name)
    places, ahead = (program.timeline(rates(program), window) for window in (0, None))
    assert places.compute_seconds == pytest.approx(ahead.compute_seconds)
    assert places.exposed_transfers > 1.2 * ahead.exposed_transfers
    both = places.compute_seconds + sum(
        span.end - span.start for span in places.spans if span.stream == "copies in"
    )
    assert places.seconds > 0.95 * both


def test_loads_do_not_wait_for_stores_that_were_dispatched_before() -> None:
    """Although XLA's client shares its streams among both, and they share the link's rate."""
    link = replace(
        machine("h200").rates("bfloat16", 1), host_link=1e9, both_ways=5e8, transfer_dispatch_s=0.0
    )
    device = SimulatedDevice(link, lambda _: 0.0, lambda _: 0)
    (stored,) = device.transfer_arrays([device.create_array(10**9, True)], ["host"])
    loaded = device.transfer_arrays(
        [device.create_array(10**6, False) for _ in range(8)], ["device"] * 8
    )
    assert stored.ready == pytest.approx(1, rel=0.01)
    assert max(array.ready for array in loaded) == pytest.approx(8 * 2e-3, rel=0.1)


def test_updates_behind_the_forward_pass_wait_less() -> None:
    """Their transfers are hidden, and one load of the weights is gone."""
    end, behind = traced("gptj_tiny"), traced("gptj_tiny", "deferred")
    loaded = [sum(part.host_to_device for part in p.plan().parts) for p in (end, behind)]
    weights = sum(
        math.prod(b.tensor_shape) * b.tensor_dtype.itemsize * b.entries
        for b in end.ir.remote_buffers
        if b.kind == "weights"
    )
    assert 0.5 * weights < loaded[0] - loaded[1] <= weights
    runs = [p.timeline(rates(end)) for p in (end, behind)]
    assert runs[1].exposed_transfers < 0.7 * runs[0].exposed_transfers


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("gptj_6B_gpu", 8),
        slow("xl_gpu", 8),
        slow("xl_gpu", 24),
        slow("gptj_6B_gpu", 28),
    ],
)
def test_a_run_in_bulk_takes_as_long_as_the_simulation_says(name: str, layers: int) -> None:
    """With all entries in host memory, and with one kind on the device."""
    target = machine("h200")
    program = finetuning_requirements(
        preset(name, model={"layers": layers}), target.platform
    ).traced
    rates = target.rates("bfloat16", 1)
    for kind in ("none", "weights", "moments", "gradients", "activations between layers"):
        time_estimate = program.staged_time_estimate(
            rates, default_prefetch_window(program.schedule)
        )
        time_estimate.move_entries([e for e in time_estimate.transfers if e[0].kind == kind], -1)
        for buffer in program.ir.remote_buffers:
            buffer.resident = buffer.entries if buffer.kind == kind else 0
        expected = program.timeline(rates).seconds
        assert time_estimate.run_seconds() == pytest.approx(expected, rel=TOLERANCE), kind


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_placement_beats_keeping_one_kind(name: str, share: float) -> None:
    """With room for a part of the buffers: no kind's entries, as many as fit, save as much."""
    program = traced(name, "deferred")
    link, plan = rates(program), program.plan()
    buffers = program.ir.remote_buffers
    device = (
        int(
            (share * plan.remote + program.timeline(link).extent + plan.fixed_device_bytes)
            / (1 - MARGIN)
        )
        + 9
    )
    try:
        placement = popxl.plan.place_entries(program, link, device)
        assert 0.9 * share * plan.remote < placement.nbytes <= placement.free_bytes
        taken = placement.timeline.extent + plan.fixed_device_bytes  # gaps are not known before
        assert taken <= (1 - MARGIN) * device + 0.25 * placement.free_bytes
        found = []
        for kind in {buffer.kind for buffer in buffers}:
            left = placement.free_bytes
            for buffer in buffers:
                nbytes = math.prod(buffer.tensor_shape) * buffer.tensor_dtype.itemsize
                fits = min(left // nbytes, buffer.entries) if buffer.kind == kind else 0
                buffer.resident = fits
                left -= fits * nbytes
            found.append(program.timeline(link).seconds)
        assert placement.timeline.seconds < min(found) < placement.all_host_timeline.seconds
    finally:
        for buffer in buffers:
            buffer.resident = 0


def num_runs(program: popxl.plan.TracedProgram) -> int:
    return sum(program.segment_runs.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_long_run_takes_of_a_device_follows_from_a_shorter_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is placed after that, the run with all in host memory is simulated as it was."""
    batch = {"global_batch_size": 24}, {"micro_batch_size": 1}
    config = preset(name, model={"layers": 10}, training=batch[0], execution=batch[1])
    program, link = (
        finetuning_requirements(config, "gpu").traced,
        machine("rtx4090").rates("float32", 1),
    )
    expected = program.timeline(link)
    steps = [event.step for event in events_of_run(program.schedule)]
    assert program.segment_runs == Counter(s.segment for s in steps if isinstance(s, Run))
    monkeypatch.setattr(popxl.plan.placement, "_LONG", num_runs(program) - 1)
    monkeypatch.setattr(popxl.plan.placement, "_ITERATIONS", 6)
    all_host = popxl.plan.AllHostSimulation(program, link)
    short = all_host.short_timeline
    assert 0.95 * expected.peak <= short.peak <= expected.peak
    # Gaps between arrays depend on all that came before: a shorter run may have larger ones.
    assert short.peak <= short.extent <= 1.002 * expected.extent
    assert num_runs(program.truncate_loops(6)) < 0.25 * num_runs(program)
    placement = popxl.plan.place_entries(
        program, link, 2 * all_host.short_timeline.extent, all_host=all_host
    )
    kept = {buffer: buffer.resident_entries for buffer in program.ir.remote_buffers}
    assert any(kept.values())
    assert placement.all_host_timeline.seconds == expected.seconds > placement.timeline.seconds
    assert {buffer: buffer.resident_entries for buffer in program.ir.remote_buffers} == kept


@pytest.mark.parametrize("name", FAMILIES)
def test_memory_is_what_the_plan_counts_where_nothing_is_on_its_way(name: str) -> None:
    program = traced(name)
    at_once = dict.fromkeys(("flops", "float8_flops", "bandwidth", "host_link"), 1e40)
    quick = replace(
        rates(program), **at_once, dispatch_s=1e-3, kernel_launch_s=0.0, transfer_dispatch_s=1e-3
    )
    found = program.timeline(quick, window=0)
    assert found.peak == program.plan().temporaries
    assert program.timeline(quick).peak <= found.peak + found.window + default_prefetch_window(
        program.schedule
    )


def test_the_trace_has_a_row_for_each_stream_and_all_that_moves() -> None:
    program = traced("gptj_tiny")
    made = program.timeline(rates(program))
    events = json.loads(json.dumps(made.to_chrome_trace()))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert set(names.values()) == {"compute", "copies in", "copies out", "disk", "host"}
    loads = [e for e in events if e["ph"] == "X" and names[e["tid"]] == "copies in"]
    ops = Counter[str]()
    for part in program.plan().parts:
        ops.update(part.ops)
    assert len(loads) == ops["remote_load"]
    assert max(e["ts"] + e["dur"] for e in loads) <= 1e6 * made.seconds
