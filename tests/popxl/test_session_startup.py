"""`session.startup_stats` tells what creating the session did."""

from __future__ import annotations

import dataclasses
import time

import pytest

import popxl
from popxl import ops
from popxl._compile import xla_compile
from popxl.session import StartupStats


def _program() -> popxl.Ir:
    ir = popxl.Ir()
    with ir.main_graph:
        ops.add_(popxl.variable([1.0, 2.0]), popxl.constant([3.0, 4.0]))
    return ir


def test_without_a_cache_each_session_traces_and_compiles_once():
    first, second = (popxl.Session(_program()).startup_stats for _ in range(2))
    for startup in (first, second):
        assert dataclasses.replace(startup, seconds=0) == StartupStats(
            0, False, traces=1, compiles=1
        )


def test_a_second_start_neither_traces_nor_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("POPXL_CACHE_DIR", str(tmp_path))
    first, second = (popxl.Session(_program()).startup_stats for _ in range(2))
    assert dataclasses.replace(first, seconds=0) == StartupStats(0, False, traces=1, compiles=1)
    assert dataclasses.replace(second, seconds=0) == StartupStats(0, True, traces=0, compiles=0)


def test_seconds_are_the_time_of_the_creation(monkeypatch):
    longer, compiled = 0.5, xla_compile.compile_lowered
    monkeypatch.setattr(
        xla_compile,
        "compile_lowered",
        lambda *given: (time.sleep(longer), compiled(*given))[1],
    )
    start = time.perf_counter()
    session = popxl.Session(_program())
    total = time.perf_counter() - start
    assert longer < session.startup_stats.seconds <= total
    with session:
        session.run()
    assert session.startup_stats.seconds <= total, "running must not count"


def test_it_cannot_be_changed():
    startup = popxl.Session(_program()).startup_stats
    with pytest.raises(dataclasses.FrozenInstanceError):
        startup.traces = 0
