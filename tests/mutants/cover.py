"""A plugin of pytest that notes which lines each test runs: `python -m tests.mutants map`.

Lines go to coverage's own data files, one context for each test; its seconds go to `seconds.jsonl`.
What a test's set-up runs counts for all tests of its file, since fixtures are shared. Processes
that a test starts are measured too: coverage's `.pth` starts it where `COVERAGE_PROCESS_START` is
set.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).parent.parent.parent
SETTINGS = """\
[run]
source = {root}
omit = {root}/tests/*
parallel = true
relative_files = true
data_file = {folder}/lines
context = ${{MUTANTS_CONTEXT}}
core = ctrace
disable_warnings = no-data-collected, module-not-imported, module-not-measured,
    already-imported, couldnt-parse, trace-changed
"""


class Cover:
    """Switches contexts as tests go by, and writes what it has after each file of tests."""

    def __init__(self, folder: Path):
        self.folder, self.file, self.before = folder, "", {}
        settings = folder / "settings.ini"
        settings.write_text(SETTINGS.format(root=ROOT, folder=folder))
        os.environ |= {"COVERAGE_PROCESS_START": str(settings), "MUTANTS_CONTEXT": ""}
        self.lines = coverage.Coverage(config_file=str(settings))
        self.lines.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        file = nodeid.partition("::")[0]
        if file != self.file:
            self.file = file
            self.lines.save()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item):
        self._enter(self.file)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        self._enter(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "teardown":
            self._enter("")
        line = {"test": report.nodeid, "when": report.when, "outcome": report.outcome}
        with (self.folder / "seconds.jsonl").open("a") as out:
            out.write(json.dumps(line | {"seconds": round(report.duration, 3)}) + "\n")

    def _enter(self, context: str) -> None:
        self.lines.switch_context(context)
        os.environ["MUTANTS_CONTEXT"] = context

    def pytest_sessionfinish(self) -> None:
        self.lines.stop()
        self.lines.save()


def pytest_configure(config: pytest.Config) -> None:
    folder = Path(os.environ["MUTANTS_FOLDER"])
    folder.mkdir(parents=True, exist_ok=True)
    config.pluginmanager.register(Cover(folder), "mutants-cover")
