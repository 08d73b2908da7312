"""Drafts of a reference: damage of any kind costs a computation, and never a number."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from run.reference_logps_cache import (
    LogpsDraftFile,
    read_logps_file,
    remove_stale_drafts,
    write_logps_file,
)
from tests.children import child
from tests.full_disk import full_disk

SHAPE = (11, 2, 2)
VALUES = np.random.default_rng(5).normal(size=SHAPE).astype(np.float32)
ENDS = (3, 6, 9)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A draft of three records, of nine samples."""
    path = tmp_path / "reference" / "key.draft"
    with LogpsDraftFile(path, SHAPE, True) as draft:
        draft.truncate(0)
        for end in ENDS:
            draft.append(VALUES[end - 3 : end])
    return path


def known(path: Path, writes: bool = False) -> int:
    """Number of samples that a draft has; their values are checked."""
    with LogpsDraftFile(path, SHAPE, writes) as draft:
        np.testing.assert_array_equal(
            draft.truncate(draft.num_samples)[: draft.num_samples], VALUES[: draft.num_samples]
        )
        return draft.num_samples


def test_it_goes_on_where_it_was(path: Path) -> None:
    assert known(path) == 9
    with LogpsDraftFile(path, SHAPE, True) as draft:
        draft.truncate(6)  # as far as another process has it
        draft.append(VALUES[6:10])
        assert known(path) == 10  # who only reads is not kept out
    with LogpsDraftFile(path, SHAPE, True) as draft:
        draft.truncate(10)
        draft.append(VALUES[10:])
        draft.remove()
    assert known(path) == 0


@pytest.mark.parametrize("seed", range(60))
def test_damage_ends_what_is_known(path: Path, seed: int) -> None:
    """Bits, bytes that are missing, doubled or foreign, at any place."""
    draw, content = random.Random(seed), bytearray(path.read_bytes())
    whole = bytes(content)
    at, size = draw.randrange(len(content)), draw.choice([1, 4, 60])
    damage: list[Callable[[], object]] = [
        lambda: content.__setitem__(at, content[at] ^ (1 << draw.randrange(8))),
        lambda: content.__delitem__(slice(at, None)),
        lambda: content.__delitem__(slice(at, at + size)),
        lambda: content.__setitem__(slice(at, at), content[at : at + size]),
        lambda: content.__setitem__(slice(at, at + size), draw.randbytes(size)),
    ]
    draw.choice(damage)()
    path.write_bytes(content)
    pairs = enumerate(zip(whole, content, strict=False))
    intact = next((n for n, (a, b) in pairs if a != b), min(len(whole), len(content)))
    assert known(path, writes=True) == 3 * (3 * intact // len(whole))
    with LogpsDraftFile(path, SHAPE, True) as draft:
        at = draft.num_samples
        draft.truncate(at)
        draft.append(VALUES[at : at + 2])
    assert known(path) == at + 2


def test_a_changed_number_is_said(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert known(path) == 6
    assert f"{path} is damaged: the samples after the first 6 are" in capsys.readouterr().err


def test_records_that_are_swapped_or_of_another_draft_are_not_used(path: Path) -> None:
    content = path.read_bytes()
    size = len(content) // 3
    path.write_bytes(content[:size] + content[2 * size :] + content[size : 2 * size])
    assert known(path) == 3
    other = path.with_name("other.draft")
    other.write_bytes(content)
    assert known(other) == 0


def test_what_is_no_file_is_passed_over(tmp_path: Path, capsys) -> None:
    folder, pipe = tmp_path / "folder.draft", tmp_path / "pipe.draft"
    folder.mkdir()
    os.mkfifo(pipe)
    for path, why in ((folder, "it is a folder"), (pipe, "it is not a regular file")):
        with LogpsDraftFile(path, SHAPE, True) as draft:
            draft.truncate(0)
            draft.append(VALUES[:3])
            assert draft.num_samples == 3
            draft.remove()
        assert path.exists()
        assert why in capsys.readouterr().err


def test_a_full_disk_is_a_warning(path: Path, capsys) -> None:
    with LogpsDraftFile(path, SHAPE, True) as draft, full_disk(path.stat().st_size + 10):
        draft.truncate(9)
        draft.append(VALUES[9:10])
        draft.append(VALUES[10:])
    assert capsys.readouterr().err.count("File too large: a run that is broken off") == 1
    assert known(path) == 9


ADD = """
import sys, time
from pathlib import Path
from run.reference_logps_cache import LogpsDraftFile
with LogpsDraftFile(Path(sys.argv[1]), (11, 2, 2), True) as draft:
    print("open", flush=True)
    time.sleep(60)
"""


def test_one_process_adds_to_a_draft(path: Path) -> None:
    """A second one does without; nobody deletes what is being made."""
    other = child([sys.executable, "-c", ADD, str(path)], cwd=Path(__file__).parents[2])
    assert other.stdout is not None
    assert other.stdout.readline() == "open\n"
    before = path.read_bytes()
    with LogpsDraftFile(path, SHAPE, True) as draft:
        draft.truncate(3)
        draft.append(VALUES[3:6])
        draft.remove()
    remove_stale_drafts(path.parent)
    assert path.read_bytes() == before
    other.kill()
    other.communicate()
    remove_stale_drafts(path.parent)
    assert not path.exists()


def test_a_file_of_other_samples_or_damaged_is_not_used(tmp_path: Path, capsys) -> None:
    path = tmp_path / "key.safetensors"
    write_logps_file(path, VALUES)
    np.testing.assert_array_equal(read_logps_file(path, SHAPE), VALUES)
    assert read_logps_file(path, (12, 2, 2)) is None
    assert "cannot be used: it is of other samples" in capsys.readouterr().err
    content = bytearray(path.read_bytes())
    for at in range(0, len(content), 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 8]) + content[at + 1 :])
        found = read_logps_file(path, SHAPE)
        assert found is None or (found == VALUES).all()
        path.write_bytes(content[:at])
        assert read_logps_file(path, SHAPE) is None
