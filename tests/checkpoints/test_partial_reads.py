"""Ranges of tensors are read, and checked, without the rest."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from checkpoints import CheckpointError, CheckpointStore, safetensors_files
from checkpoints.safetensors_files import (
    StoredTensor,
    chunk_bytes,
    chunk_count,
    sha256_of_array,
    sha256_of_chunks,
)
from checkpoints.tensor_shards import StoredShards, TensorShard, find_needed_chunks

CHUNK = 64  # bytes, of these tests


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(safetensors_files, "_MIN_CHUNK", CHUNK)
    monkeypatch.setattr(safetensors_files, "_MAX_CHUNKS", 2**20)


@pytest.fixture
def read(monkeypatch):
    """The ranges of bytes that are read: names, first and last byte."""
    found, read_into = [], StoredTensor.read_into

    def noted(self, memory, offset):
        found.append((self.name, offset, offset + len(memory)))
        read_into(self, memory, offset)

    monkeypatch.setattr(StoredTensor, "read_into", noted)
    return found


def part(shape, start, size):
    """Consecutive elements of a tensor."""
    return TensorShard(shape, tuple(range(len(shape))), (0,) * len(shape), shape, start, size)


def columns(shape, first, count):
    """Columns of a matrix, as a transposed variable has them."""
    return TensorShard(shape, (1, 0), (first, 0), (count, shape[0]), 0, count * shape[0])


def test_a_range_is_read_and_nothing_else(tmp_path, read):
    array = np.random.default_rng(0).standard_normal((40, 30)).astype(np.float32)
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"w": array, "other": array}, {})
        tensors = store.load().tensors
    each = CHUNK // 4
    for start, size in [(0, 1), (15, 2), (333, 100), (1199, 1), (0, 1200), (7, 0)]:
        read.clear()
        found = tensors.read_shards("w", [part((40, 30), start, size)])
        assert np.array_equal(found.reshape(-1)[start:][:size], array.reshape(-1)[start:][:size])
        chunks = range(start // each, -(-(start + size) // each)) if size else ()
        assert [r[1:] for r in read] == [(64 * i, min(64 * i + 64, 4800)) for i in chunks]
    read.clear()
    found = tensors.read_shards("w", [columns((40, 30), 4, 3)])
    assert np.array_equal(found[:, 4:7], array[:, 4:7])
    assert 0 < sum(end - start for _, start, end in read) < array.nbytes


def test_what_is_needed_has_all_that_is_wanted():
    """Against a look at every element: any cut of a matrix, stored in parts of any other cut."""
    rng, shape = np.random.default_rng(1), (6, 8)

    def any_part():
        axes = tuple(rng.permutation(2).tolist())
        sizes = [shape[a] for a in axes]
        corner = [int(rng.integers(n)) for n in sizes]
        box = [int(rng.integers(1, n - c + 1)) for n, c in zip(sizes, corner, strict=True)]
        start = int(rng.integers(np.prod(box)))
        size = int(rng.integers(np.prod(box) - start + 1))
        return TensorShard(shape, axes, tuple(corner), tuple(box), start, size)

    def elements(one):
        numbers = np.arange(48).reshape(shape).transpose(one.axes)
        where = tuple(slice(c, c + n) for c, n in zip(one.offsets, one.sizes, strict=True))
        return numbers[where].reshape(-1)[one.start : one.start + one.length].tolist()

    for _ in range(300):
        wanted = tuple(any_part() for _ in range(rng.integers(4)))
        marked = set(itertools.chain.from_iterable(map(elements, wanted)))
        spans, expected = [], []
        for _ in range(2):
            each, start, parts, chunks = int(rng.integers(1, 9)), 0, [], set()
            for one in (any_part() for _ in range(3)):
                parts.append((start, one))
                held = enumerate(elements(one), start)
                chunks |= {i // each for i, element in held if element in marked}
                start += one.length
            spans.append(StoredShards(each, tuple(parts)))
            expected.append(tuple(sorted(chunks)))
        assert find_needed_chunks(wanted, tuple(spans)) == tuple(expected)


def test_damage_is_found_in_the_ranges_that_are_read(tmp_path):
    array = np.arange(1000, dtype=np.float32)
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"w": array}, {})
        checkpoint = store.load()
    (path,) = checkpoint.path.glob("*.safetensors")
    with path.open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0\1")
    first, last = part((1000,), 0, 100), part((1000,), 990, 10)
    assert np.array_equal(checkpoint.tensors.read_shards("w", [first])[:100], array[:100])
    with pytest.raises(CheckpointError, match="is not what was saved"):
        checkpoint.tensors.read_shards("w", [last])
    assert sorted(_fails(checkpoint.tensors, i) for i in range(3)) == [False, False, True]


def _fails(tensors, share):
    try:
        tensors.verify(share, 3)
    except CheckpointError:
        return True
    return False


def test_digests_are_as_many_as_chunks(monkeypatch):
    monkeypatch.undo()
    for nbytes in (0, 1, 2**20, 2**20 + 1, 2**26, 2**26 + 1, 10**12):
        each = chunk_bytes(nbytes)
        assert each >= 2**20
        assert each & (each - 1) == 0  # so that no element is in two of them
        assert chunk_count(nbytes) == -(-nbytes // each) <= 32
    assert [chunk_count(2**20 + n) for n in (0, 1)] == [1, 2]
    array = np.random.default_rng(0).bytes(2**20 + 5)
    pieces = (np.frombuffer(piece, np.uint8) for piece in (array[: 2**20], array[2**20 :]))
    assert sha256_of_chunks(np.frombuffer(array, np.uint8)) == [
        sha256_of_array(piece) for piece in pieces
    ]
