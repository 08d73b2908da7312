"""A plugin of pytest for `python -m tests.mutants map`: says which test runs, and how long it took.

What a test's set-up runs counts for all tests of its file, since fixtures are shared.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import mutants_reached
import pytest


def _enter(context: str) -> None:
    mutants_reached.test = os.environ["MUTANTS_TEST"] = context  # of processes, too


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item):
    _enter(item.nodeid.partition("::")[0])
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    _enter(item.nodeid)
    return (yield)


class Seconds:
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        with Path(os.environ["MUTANTS_SECONDS"]).open("a") as out:
            out.write(json.dumps(line) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the one that hears of all reports
        config.pluginmanager.register(Seconds(), "mutants-seconds")
