"""Digests of weights of an earlier start: used only while the files are as they were."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from run.known_digests import MIN_AGE, KnownDigests

DIGESTS = {"weight": "abc"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock when the files are no longer new."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * MIN_AGE)


def digests_of(file: Path, key: str = "model") -> KnownDigests:
    return KnownDigests.for_files(file.parent / "digests", [key], [file])


def test_files_as_they_were_are_not_hashed_again(file: Path, later: None) -> None:
    assert digests_of(file).read() == {}
    digests_of(file).write(DIGESTS)
    assert digests_of(file).read() == DIGESTS
    assert digests_of(file, "other sizes").read() == {}


def rewrite(file: Path) -> None:
    file.write_bytes(b"WEIGHTS")


def replace(file: Path) -> None:
    other = file.with_name("other")
    rewrite(other)
    other.rename(file)


@pytest.mark.parametrize("change", [rewrite, replace])
def test_changed_files_are_even_with_the_times_of_before(
    change: Callable[[Path], None], file: Path, later: None
) -> None:
    digests_of(file).write(DIGESTS)
    before = file.stat()
    change(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert digests_of(file).read() == {}


def test_files_that_change_while_they_are_hashed_are_not_known(file: Path, later: None) -> None:
    known = digests_of(file)
    rewrite(file)
    known.write(DIGESTS)
    assert digests_of(file).read() == {}


def test_new_files_are_not_known(file: Path) -> None:
    """The next write could have the same time."""
    digests_of(file).write(DIGESTS)
    assert digests_of(file).read() == {}


def test_a_damaged_file_is_no_digest(file: Path, later: None) -> None:
    digests_of(file).write(DIGESTS)
    (stored,) = (file.parent / "digests").iterdir()
    stored.write_text(stored.read_text()[:-5])
    assert digests_of(file).read() == {}
