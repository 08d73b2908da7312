"""A script starts anew with huge pages, once, and as it was started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from terminal import huge_pages
from terminal.huge_pages import restart_with_huge_pages, with_huge_pages

ROOT = Path(__file__).parents[2]
ASKED = "glibc.malloc.hugetlb=1"
SCRIPT = """
import json, os, sys
from terminal.entry_point import entry_point

@entry_point(single_process={alone})
def main(arguments=None):
    said = sys.stdin.read()
    print(json.dumps([os.getpid(), os.environ.get("GLIBC_TUNABLES"), sys.argv[1:], said]))

if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ASKED),
        ("", ASKED),
        ("glibc.malloc.check=3", f"glibc.malloc.check=3:{ASKED}"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_what_the_environment_says_stays(given, expected):
    environment = {"A": "b"} | ({} if given is None else {"GLIBC_TUNABLES": given})
    assert with_huge_pages(environment) == {"A": "b", "GLIBC_TUNABLES": expected}


def ran(script: Path, *arguments: str) -> tuple[int, list]:
    """The script's process, and what it said of itself."""
    environment = {n: v for n, v in os.environ.items() if n != "GLIBC_TUNABLES"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "runtime/src")])
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, _ = process.communicate("a line")
    assert process.returncode == 0
    return process.pid, json.loads(out)


@pytest.mark.skipif(
    not huge_pages._has_huge_pages_on_request(), reason="the system has no huge pages to ask for"
)
@pytest.mark.parametrize("alone", [False, True])
def test_a_script_that_runs_models_starts_anew(alone, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(alone=alone))
    pid, said = ran(script, "--two words", "é")
    assert said == [pid, None if alone else ASKED, ["--two words", "é"], "a line"]


@pytest.mark.skipif(
    not huge_pages._has_huge_pages_on_request(), reason="the system has no huge pages to ask for"
)
def test_so_does_a_script_whose_main_is_elsewhere(tmp_path):
    (tmp_path / "elsewhere.py").write_text(SCRIPT.format(alone=False))
    script = tmp_path / "script.py"
    script.write_text("import sys\nfrom elsewhere import main\nsys.exit(main())\n")
    pid, said = ran(script, "a")
    assert said == [pid, ASKED, ["a"], "a line"]


def test_a_script_of_standard_input_runs_once():
    script = SCRIPT.format(alone=False).replace("sys.stdin.read()", '"nothing"')
    done = subprocess.run(
        [sys.executable, "-", "a"], cwd=ROOT, input=script, capture_output=True, text=True
    )
    assert json.loads(done.stdout)[2:] == [["a"], "nothing"], done.stderr


def test_it_goes_on_as_it_is_where_programs_may_not_be_started(monkeypatch):
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr(huge_pages, "_has_huge_pages_on_request", lambda: True)
    monkeypatch.setattr(sys, "argv", [__file__])
    monkeypatch.setattr(os, "execve", refused)
    restart_with_huge_pages()


def test_a_system_without_huge_pages_is_left_alone(monkeypatch, tmp_path):
    for setting in (None, "always madvise [never]\n", "[always] madvise never\n"):
        path = tmp_path / "enabled"
        if setting is not None:
            path.write_text(setting)
        monkeypatch.setattr(huge_pages, "_SETTING", path)
        assert not huge_pages._has_huge_pages_on_request()
