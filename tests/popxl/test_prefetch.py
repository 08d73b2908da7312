"""Entries that move between two memories, ahead of their turn: the same bits, in a legal order.

CPU devices have both kinds of memory, `device` and `pinned_host`; told that they differ, the engine
moves entries as on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl._compile import platforms
from popxl._schedule import lookahead
from popxl._schedule.lookahead import default_prefetch_window
from popxl._schedule.schedule import Run
from popxl._storage import device_put as device_put_module
from popxl._storage.prefetch import PrefetchMover
from popxl.ops.var_updates import accumulate_
from tests.popxl.programs import f32, store

pytestmark = pytest.mark.usefixtures("cached")  # the same programs for each case

LAYERS, WIDTH = 4, 8


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets sessions move entries between memories; gives the transfers they ask for."""

    def use(window: int | None = None) -> list[list[str]]:
        calls: list[list[str]] = []

        def put(arrays: Any, to: Any) -> list[jax.Array]:
            calls.append([s.memory_kind for s in to])
            return device_put_module.device_put_batch(arrays, to)

        monkeypatch.setattr(platforms.Cpu, "host_memory", "pinned_host")
        monkeypatch.setattr(platforms.Cpu, "device_put", staticmethod(put))
        if window is not None:
            monkeypatch.setattr(lookahead, "default_prefetch_window", lambda _schedule: window)
        return calls

    return use


def layered(
    resident: int | frozenset[int] = 0, replicas: int = 1
) -> tuple[popxl.Ir, popxl.HostToDeviceStream]:
    """A chain of layers forwards, and updates of their weights from moments and rows."""
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        weights = popxl.remote_buffer((WIDTH, WIDTH), popxl.float32, LAYERS)
        moments = popxl.remote_buffer((WIDTH, WIDTH), popxl.float32, LAYERS)
        rows = popxl.remote_buffer((2, WIDTH), popxl.float32, LAYERS + 1)
        for buffer in (weights, moments):
            buffer.resident = resident
        for i, value in enumerate(f32(LAYERS, WIDTH, WIDTH)):
            popxl.remote_variable(value, weights, i, name=f"w{i}")
        x = popxl.h2d_stream((2, WIDTH), popxl.float32, "x")

        def forward(row: popxl.Tensor) -> popxl.Tensor:
            w, x = ops.remote_load(weights, row), ops.remote_load(rows, row)
            ops.remote_store(rows, row + 1, ops.tanh(x @ w))
            return row + 1

        def update(row: popxl.Tensor) -> popxl.Tensor:
            w, m = ops.remote_load(weights, row), ops.remote_load(moments, row)
            x = ops.remote_load(rows, row)
            accumulate_(m, ops.transpose(x) @ x)
            ops.remote_store(moments, row, m)
            ops.remote_store(weights, row, w - m * 0.1)
            return row + 1

        ops.remote_store(rows, 0, ops.host_load(x))
        zero = popxl.constant(0, popxl.int32)
        for body in (forward, update):
            ops.repeat(ir.create_graph(body, zero), LAYERS, zero)
        store(ops.remote_load(rows, LAYERS))
    return ir, x


def trained(resident: int | frozenset[int] = 0, replicas: int = 1) -> list[np.ndarray]:
    """Outputs of three steps, and the weights afterwards."""
    ir, x = layered(resident, replicas)
    shape = (2, WIDTH) if replicas == 1 else (replicas, 2, WIDTH)
    with popxl.Session(ir) as session:
        found = [next(iter(session.run({x: f32(*shape, seed=i)}).values())) for i in range(3)]
        return [*found, *session.get_tensors_data(ir.main_graph.variables).values()]


@pytest.mark.parametrize("window", [0, WIDTH * WIDTH * 4, None])
@pytest.mark.parametrize(("resident", "replicas"), [(0, 1), (2, 1), (frozenset({1, 3}), 2)])
def test_moving_entries_ahead_changes_no_bit(moved, window, resident, replicas):
    expected = trained(0, replicas)
    calls = moved(window)
    found = trained(resident, replicas)
    assert {kind for call in calls for kind in call} == {"device", "pinned_host"}
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("replicas", [1, 2])
def test_on_a_gpu_each_direction_has_every_other_stream(moved, replicas, monkeypatch):
    """XLA puts copies on streams in turn; all that moves is moved as without spacers."""
    expected, streams = trained(0, replicas), dict[str, set[int]]()
    moved()
    monkeypatch.setattr(
        platforms.Cpu, "device_put", staticmethod(device_put_module.device_put_interleaved)
    )
    together, count = device_put_module.device_put_batch, 0

    def noted(arrays: Any, to: Any) -> list[jax.Array]:
        nonlocal count
        for array, sharding in zip(arrays, to, strict=True):
            if array.ndim > 1:
                streams.setdefault(sharding.memory_kind, set()).add(count % 4)
            count += 1
        return together(arrays, to)

    monkeypatch.setattr(device_put_module, "device_put_batch", noted)
    for a, b in zip(trained(0, replicas), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert streams == {"device": {0, 2}, "pinned_host": {1, 3}}


def test_the_window_is_two_layers_and_the_schedule_says_so(moved):
    moved()
    ir, _ = layered()
    session = popxl.Session(ir)
    largest = 4 * (2 * WIDTH * WIDTH + 2 * WIDTH)  # an update's weights, moments and row
    assert default_prefetch_window(session.schedule) == 2 * largest
    text = str(session.schedule)
    assert text.startswith("loads are dispatched ahead of the runs before them")
    assert re.search(r"# loads ahead: [\d.]+ for .*\n.* run ", text)
    session.schedule.window = 0
    assert "# loads ahead" not in str(session.schedule)


def test_a_program_says_how_far_its_loads_run_ahead(moved):
    moved()
    ir, _ = layered()
    ir.load_window = 300
    assert popxl.Session(ir).schedule.window == 300
    with pytest.raises(ValueError, match=r"load_window must be at least 1 byte, got 0"):
        ir.load_window = 0


def test_the_first_run_waits_for_no_long_look_ahead(moved, monkeypatch):
    """With all entries on the device nothing would ever fill the window, and a device that has
    nothing to do would wait while the host walks thousands of steps."""
    moved()
    passed, leads = [0, 0], list[int]()  # runs that the look-ahead passed, and that were made
    usual = lookahead.lookahead_events

    def lookahead_events(*given: Any) -> Any:
        for event in usual(*given):
            passed[0] += isinstance(getattr(event, "step", None), Run)
            yield event

    def ran(transit: PrefetchMover, *_: Any) -> None:
        passed[1] += 1
        leads.append(passed[0] - passed[1])

    monkeypatch.setattr(lookahead, "lookahead_events", lookahead_events)
    monkeypatch.setattr(PrefetchMover, "after_run", ran)
    ir = popxl.Ir()
    with ir.main_graph:
        entries = popxl.remote_buffer((WIDTH,), popxl.float32, 1)
        entries.resident = 1

        def add(x: popxl.Tensor) -> popxl.Tensor:
            ops.remote_store(entries, 0, ops.remote_load(entries, 0) + x)
            return x * 2

        (x,) = ops.repeat(ir.create_graph(add, popxl.constant(1.0)), 100, popxl.constant(1.0))
        ops.host_store(popxl.d2h_stream((), popxl.float32), x)
    with popxl.Session(ir, "cpu") as session:
        session.run()
    assert 0 < leads[0] <= 16
    assert max(leads) > 30, "it gets further ahead with each run"
