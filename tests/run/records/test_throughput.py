"""Rates from a clock that the test moves."""

from __future__ import annotations

import pytest

from run.records.throughput import Throughput


def test_rate_over_the_last_updates_without_compilation():
    now = [1000.0]  # a compilation came before the first update
    throughput = Throughput(samples_per_step=8, window=2, clock=lambda: now[0])
    throughput.update(1)
    assert throughput.samples_per_second is None
    assert throughput.eta_seconds(3) is None
    for done, at in [(2, 1002.0), (3, 1004.0), (4, 1005.0)]:
        now[0] = at
        throughput.update(done)
    # The window holds the updates of steps 2, 3 and 4: two steps in three seconds.
    assert throughput.samples_per_second == pytest.approx(2 / 3 * 8)
    assert throughput.eta_seconds(10) == pytest.approx(15)


def test_a_clock_that_stands_still_gives_no_rate():
    throughput = Throughput(samples_per_step=8, clock=lambda: 5.0)
    throughput.update(1)
    throughput.update(2)
    assert throughput.samples_per_second is None
