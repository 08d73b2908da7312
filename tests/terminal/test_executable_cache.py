"""The cache of executables: on by default, in a folder that only its user can write to."""

from __future__ import annotations

import os
import stat

import pytest

import run_finetuning
from terminal.entry_point import entry_point
from terminal.environment import use_default_cache
from tests.children import child
from tests.small_runs import ROOT, TRAINING


@pytest.fixture(autouse=True)
def unset(monkeypatch, tmp_path):
    """Nobody says anything, and the user's home is a new folder."""
    for name in ("POPXL_CACHE_DIR", "POPART_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_it_is_in_the_cache_folder_of_the_user(tmp_path):
    use_default_cache()
    folder = tmp_path / ".cache/popxl/executables"
    assert os.environ["POPXL_CACHE_DIR"] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_cache_folder_may_be_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    use_default_cache()
    assert os.environ["POPXL_CACHE_DIR"] == str(tmp_path / "mine/popxl/executables")


def test_a_relative_cache_folder_is_none(tmp_path, monkeypatch):
    """As the XDG base directory specification says."""
    monkeypatch.setenv("XDG_CACHE_HOME", "mine")
    use_default_cache()
    assert os.environ["POPXL_CACHE_DIR"] == str(tmp_path / ".cache/popxl/executables")


@pytest.mark.parametrize("name", ["POPXL_CACHE_DIR", "POPART_CACHE_DIR"])
@pytest.mark.parametrize("value", ["", "elsewhere"])
def test_what_a_person_set_stays(name, value, tmp_path, monkeypatch):
    monkeypatch.setenv(name, value)
    use_default_cache()
    assert {n: os.environ.get(n) for n in ("POPXL_CACHE_DIR", "POPART_CACHE_DIR")} == {
        "POPXL_CACHE_DIR": None,
        "POPART_CACHE_DIR": None,
        name: value,
    }
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("home", ["/dev/null", "/proc/1", "\ud800", "a\0b", "x" * 5000])
def test_a_folder_that_cannot_be_made_is_none(home, monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, "XDG_CACHE_HOME": f"/{home}"})
    use_default_cache()
    assert "POPXL_CACHE_DIR" not in os.environ


def test_scripts_use_it_that_say_so(tmp_path):
    for caches, there in ((False, False), (True, True)):
        assert entry_point(single_process=True, caches=caches)(lambda arguments=None: None)([]) == 0
        assert ("POPXL_CACHE_DIR" in os.environ) is there


@pytest.mark.slow  # two starts of a run
def test_a_second_start_compiles_nothing(tmp_path):
    said = []
    for name in ("first", "second"):
        arguments = [*TRAINING, "--steps", "1", "--run-dir", str(tmp_path / name)]
        script = ROOT / run_finetuning.__name__
        run = child(["python3", f"{script}.py", *arguments], cwd=ROOT, env=dict(os.environ))
        said.append(run.communicate(timeout=600)[1])
        assert run.returncode == 0
    assert "0 traces, 0 compilations" not in said[0]
    assert "0 traces, 0 compilations" in said[1]
