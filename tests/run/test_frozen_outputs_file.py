"""Cache files of a frozen model's outputs: damage costs a computation, and never a number."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from run.frozen_outputs_file import COMPLETE, OutputsFile, read_complete_file, remove_stale_drafts
from tests.children import child
from tests.full_disk import full_disk

OFFSETS = np.asarray([0, 1, 3, 3, 3, 7, 8, 10, 12, 12, 13, 15])
"""First row of each of 11 samples, some of which have none."""

DTYPE = np.dtype([("ids", "<i4", (2,)), ("logps", "<f2", (2,)), ("logsumexp", "<f4")])
VALUES = np.zeros(OFFSETS[-1], DTYPE)
for _name in DTYPE.names or ():
    VALUES[_name] = np.random.default_rng(5).normal(size=VALUES[_name].shape) * 100
ENDS = (3, 6, 9)


def of(start: int, stop: int) -> tuple[np.ndarray, int]:
    """The rows of samples, and the number of these."""
    return VALUES[OFFSETS[start] : OFFSETS[stop]], stop - start


def opened(path: Path, writes: bool = True) -> OutputsFile:
    return OutputsFile(path, OFFSETS, DTYPE, "the reference", writes)


def read(path: Path) -> OutputsFile | None:
    return read_complete_file(path, OFFSETS, DTYPE, "the reference")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A draft of three records, of nine samples."""
    path = tmp_path / "reference" / "key.draft"
    with opened(path) as draft:
        draft.truncate(0)
        for end in ENDS:
            draft.append(*of(end - 3, end))
    return path


def check_rows(file: OutputsFile) -> None:
    samples = range(file.num_samples)
    np.testing.assert_array_equal(file.rows(samples), of(0, len(samples))[0])
    for some in ([], list(samples)[::-2]):
        expected = [of(i, i + 1)[0] for i in some] or [VALUES[:0]]
        np.testing.assert_array_equal(file.rows(some), np.concatenate(expected))


def known(path: Path, writes: bool = False) -> int:
    """Number of samples that a draft has; their values are checked."""
    with opened(path, writes) as draft:
        draft.truncate(draft.num_samples)
        check_rows(draft)
        return draft.num_samples


def test_it_goes_on_where_it_was(path: Path) -> None:
    assert known(path) == 9
    with opened(path) as draft:
        draft.truncate(6)  # as far as another process has it
        draft.append(*of(6, 10))
        assert known(path) == 10  # who only reads is not kept out
    with opened(path) as draft:
        draft.truncate(10)
        draft.append(*of(10, 11))
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
    bytes_of_record = [40 + of(end - 3, end)[0].nbytes for end in ENDS]
    valid = int(np.count_nonzero(np.cumsum(bytes_of_record) <= intact))
    assert known(path, writes=True) == [0, *ENDS][valid]
    with opened(path) as draft:
        at = draft.num_samples
        draft.truncate(at)
        draft.append(*of(at, at + 2))
    assert known(path) == at + 2


def test_a_changed_number_is_said(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert known(path) == 6
    assert f"{path} is damaged: the samples after the first 6 are" in capsys.readouterr().err


def test_records_that_are_swapped_or_of_another_draft_are_not_used(path: Path) -> None:
    content = path.read_bytes()
    first, second, _ = np.cumsum([40 + of(end - 3, end)[0].nbytes for end in ENDS])
    path.write_bytes(content[:first] + content[second:] + content[first:second])
    assert known(path) == 3
    other = path.with_name("other.draft")
    other.write_bytes(content)
    assert known(other) == 0


def test_what_is_no_file_is_passed_over(tmp_path: Path, capsys) -> None:
    folder, pipe = tmp_path / "folder.draft", tmp_path / "pipe.draft"
    folder.mkdir()
    os.mkfifo(pipe)
    for path, why in ((folder, "it is a folder"), (pipe, "it is not a regular file")):
        with opened(path) as draft:
            draft.truncate(0)
            draft.append(*of(0, 3))
            assert draft.num_samples == 3
            draft.remove()
        assert path.exists()
        assert why in capsys.readouterr().err


def test_a_full_disk_is_a_warning(path: Path, capsys) -> None:
    with opened(path) as draft, full_disk(path.stat().st_size + 10):
        draft.truncate(9)
        draft.append(*of(9, 10))
        draft.append(*of(10, 11))
    assert capsys.readouterr().err.count("File too large: a run that is broken off") == 1
    assert known(path) == 9


ADD = """
import sys, time
from pathlib import Path
import numpy as np
from run.frozen_outputs_file import OutputsFile
with OutputsFile(
    Path(sys.argv[1]), np.arange(12), np.dtype("<f4"), "the reference", True
) as draft:
    print("open", flush=True)
    time.sleep(60)
"""


def test_one_process_adds_to_a_draft(path: Path) -> None:
    """A second one does without; nobody deletes what is being made."""
    other = child([sys.executable, "-c", ADD, str(path)], cwd=Path(__file__).parents[2])
    assert other.stdout is not None
    assert other.stdout.readline() == "open\n"
    before = path.read_bytes()
    with opened(path) as draft:
        draft.truncate(3)
        draft.append(*of(3, 6))
        draft.remove()
    remove_stale_drafts(path.parent)
    assert path.read_bytes() == before
    other.kill()
    other.communicate()
    remove_stale_drafts(path.parent)
    assert not path.exists()


def test_a_complete_file_is_the_draft_renamed(path: Path) -> None:
    """Whoever reads it later has the same rows, and so has whoever wrote it."""
    with opened(path) as draft:
        assert not draft.is_complete
        draft.append(*of(9, 11))
        draft.publish()
        check_rows(draft)
    assert not path.exists()
    file = read(path.with_suffix(COMPLETE))
    assert file is not None
    with file:
        check_rows(file)
        assert file.all_rows_on_disk


def test_rows_that_no_file_has_are_in_memory(path: Path) -> None:
    with opened(path, writes=False) as draft:
        draft.append(*of(9, 11))
        draft.publish()
        assert draft.is_complete
        assert not draft.all_rows_on_disk
        check_rows(draft)
    assert known(path) == 9


def test_a_damaged_complete_file_is_not_used(path: Path, capsys) -> None:
    with opened(path) as draft:
        draft.append(*of(9, 11))
        draft.publish()
    path = path.with_suffix(COMPLETE)
    content = path.read_bytes()
    assert read(path.with_name("other.rows")) is None
    assert capsys.readouterr().err == ""
    for at in range(0, len(content), 7):
        for damaged in (content[:at] + bytes([content[at] ^ 8]) + content[at + 1 :], content[:at]):
            path.write_bytes(damaged)
            assert read(path) is None
            assert "cannot be used: it is damaged" in capsys.readouterr().err
