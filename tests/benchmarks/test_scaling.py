"""Numbers of many processes are extrapolated from counts of a few."""

from __future__ import annotations

import pytest

from benchmarks.scaling import MAX_PROCESSES, _extrapolate


def test_messages_and_bytes_of_many_processes():
    rows = [
        {
            "processes": n, "messages": 6 * n + 4, "bytes": 30 * n * n + 200 * n + 7,
            "service_s": 0.001 * n, "watch_messages": 2 * n, "watch_service_s": 0.002 * n,
        }
        for n in (2, 4, 8, 16)
    ]  # fmt: skip
    extrapolated = _extrapolate(rows)
    assert extrapolated["messages"] == pytest.approx(6 * MAX_PROCESSES + 4)
    assert extrapolated["bytes"] == pytest.approx(30 * MAX_PROCESSES**2 + 200 * MAX_PROCESSES + 7)
    assert extrapolated["service_s"] == pytest.approx(0.016 / 100 * (6 * MAX_PROCESSES + 4))
    assert extrapolated["watch_messages"] == pytest.approx(MAX_PROCESSES * (1 + 1 / 17))
    assert extrapolated["watch_service_s"] == pytest.approx(0.001 * MAX_PROCESSES * (1 + 1 / 17))
