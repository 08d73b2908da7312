"""Reading safetensors files tensor by tensor, checked against digests where there are any."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from checkpoints.digests import Digests, chunk_bytes, digest_of_bytes
from checkpoints.errors import CheckpointError, DamagedError
from checkpoints.layouts import Piece
from checkpoints.parts import Part, assembled
from checkpoints.ranges import Span, chunks_needed
from checkpoints.stored import Stored, TensorSpec, tensors_in
from files.shown import shown_name

# SHA-256 does about 1.2 GB/s on one core; more threads than this wait for the disk.
MAX_READERS = 4


@contextmanager
def readers() -> Iterator[ThreadPoolExecutor]:
    """Threads to read and digest with; what they have not begun when the context ends is left."""
    pool = ThreadPoolExecutor(min(MAX_READERS, os.cpu_count() or 1))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


class TensorFiles(Mapping[str, np.ndarray]):
    """The tensors of some safetensors files by name; each access reads one from disk.

    The files are opened at once and stay open, so that deleting them (as a running training does
    with old checkpoints) does not disturb. An array that was read belongs to the caller.
    """

    def __init__(
        self,
        files: Iterable[Path],
        digests: Mapping[str, Digests] | None = None,
        pieces: Mapping[str, Sequence[Piece]] | None = None,
    ) -> None:
        """Open `files`.

        Args:
            files: safetensors files without a tensor's name in common.
            digests: of every tensor in them; reading another value is then an error.
            pieces: of tensors that are made of some in the files, by name.

        Raises:
            CheckpointError: if a file is missing or damaged, or names do not fit.
        """
        found: dict[str, Stored] = {}
        for path in files:
            for one in tensors_in(path):
                if one.name in found:
                    raise CheckpointError(
                        f"tensor {one.name} is in {found[one.name].path} and also in {path.name}"
                    )
                found[one.name] = one
        self._files: Mapping[str, Stored] = found
        self._digests, self._pieces = digests, pieces or {}
        owners = [
            (stored, name)
            for name, of_one in self._pieces.items()
            for stored in {piece.stored for piece in of_one}
        ]
        inside = {stored for stored, _ in owners}
        missing = inside - self._files.keys()
        if missing:
            raise CheckpointError(f"tensor {min(missing)}, a part of one, is missing")
        if len(inside) < len(owners) or not self._pieces.keys().isdisjoint(self._files):
            raise CheckpointError("a tensor is part of several, or stored both whole and in parts")
        for name, of_one in self._pieces.items():
            self._check_pieces(name, of_one)
        names = [name for name in self._files if name not in inside]
        self._names = dict.fromkeys([*names, *self._pieces])

    def __getitem__(self, name: str) -> np.ndarray:
        """Read one tensor.

        Raises:
            KeyError: if there is none of that name.
            DamagedError: if it cannot be read, or is not what its digest says.
        """
        if name not in self._pieces:
            return self._read(name)
        arrays = {piece.stored: self._read(piece.stored) for piece in self._pieces[name]}
        return self._assembled(name, arrays)

    def some(self, name: str, wanted: Sequence[Part]) -> np.ndarray:
        """Read of one tensor the chunks that have the elements of the parts `wanted`.

        Returns:
            The tensor; elements outside of these chunks are 0.

        Raises:
            KeyError, DamagedError: as when all of it is read.
        """
        needed = self._needed(name, tuple(wanted))
        arrays = {one: self._read(one, chunks) for one, chunks in needed.items() if chunks}
        if name in self._pieces:
            return self._assembled(name, arrays)
        return arrays[name] if arrays else np.zeros(*reversed(self.spec(name)))

    def _needed(self, name: str, wanted: tuple[Part, ...]) -> dict[str, tuple[int, ...]]:
        """The chunks, in the files, that have elements of the parts `wanted` of a tensor."""
        whole = [Piece(name, 0, _whole(self.spec(name)))]
        stored: dict[str, list[tuple[int, Part]]] = {}
        for piece in self._pieces.get(name, whole):
            stored.setdefault(piece.stored, []).append((piece.start, piece.part))
        spans = (Span(self._elements(one), tuple(parts)) for one, parts in stored.items())
        return dict(zip(stored, chunks_needed(wanted, tuple(spans)), strict=True))

    def _assembled(self, name: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """A tensor in pieces, of what was read of them."""
        dtype, shape = self.spec(name)

        def elements(piece: Piece) -> np.ndarray:
            return arrays[piece.stored][piece.start : piece.start + piece.part.size]

        there = self._pieces_in(name, arrays)
        return assembled(shape, dtype, {piece.part: partial(elements, piece) for piece in there})

    def _pieces_in(self, name: str, stored: Collection[str]) -> Iterable[Piece]:
        """The pieces of a tensor that are in what is stored under some names."""
        return (piece for piece in self._pieces[name] if piece.stored in stored)

    def _check_pieces(self, name: str, pieces: Sequence[Piece]) -> None:
        """Raise CheckpointError unless what is stored has the size and type of the pieces."""
        ends = {piece.stored: piece.start + piece.part.size for piece in pieces}
        specs = {stored: self.stored_spec(stored) for stored in ends}
        dtype = next(iter(specs.values())).dtype
        if any(spec != (dtype, (ends[stored],)) for stored, spec in specs.items()):
            raise CheckpointError(
                f"tensor {shown_name(name)} cannot be put together: its parts are of several "
                "types, or not of their sizes"
            )

    @property
    def stored(self) -> Collection[str]:
        """The names of the tensors in the files: whole ones, and parts."""
        return self._files.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._names  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of a tensor, without reading it.

        Raises:
            KeyError: if there is none of that name.
            CheckpointError: for a dtype that NumPy lacks.
        """
        if name in self._pieces:
            piece = self._pieces[name][0]
            return TensorSpec(self.stored_spec(piece.stored).dtype, piece.part.shape)
        return self.stored_spec(name)

    def stored_spec(self, name: str) -> TensorSpec:
        """The same of a tensor in the files, which may be a part."""
        return self._files[name].spec

    def fingerprint(self) -> str:
        """A digest of the files' sizes and first megabytes, which tells most models apart."""
        found = hashlib.sha256()
        for path in sorted({one.path for one in self._files.values()}):
            with path.open("rb") as file:
                found.update(f"{path.name} {path.stat().st_size}\n".encode())
                found.update(file.read(2**20))
        return found.hexdigest()

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Read every tensor once, in order to compare it with its digests.

        No more chunks than `MAX_READERS` are in memory at a time.

        Args:
            part, parts: read only the chunks of one of so many parts.

        Raises:
            DamagedError: about the first that is not what was saved.
        """

        def read(chunk: tuple[str, int]) -> None:
            name, number = chunk
            start, end = self._range(name, number)
            self._read_chunk(name, number, memoryview(bytearray(end - start)))

        chunks = [(name, i) for name in self._files for i in range(self._count(name))]
        with readers() as pool:
            for _ in pool.map(read, chunks[part::parts]):
                pass

    # ---- chunks ---------------------------------------------------------------------------------
    def _read(self, name: str, chunks: Iterable[int] | None = None) -> np.ndarray:
        """A tensor in the files; elements outside of the chunks, if these are given, are 0."""
        spec = self.stored_spec(name)
        content = np.zeros(spec.nbytes, np.uint8)
        for number in range(self._count(name)) if chunks is None else chunks:
            start, end = self._range(name, number)
            self._read_chunk(name, number, content.data[start:end])
        return content.view(spec.dtype).reshape(spec.shape)

    def _read_chunk(self, name: str, number: int, memory: memoryview) -> None:
        """Read a chunk, and compare it with its digest."""
        stored = self._files[name]
        stored.read_into(memory, number * self._each(name))
        if self._digests is None:
            return
        if digest_of_bytes(memory) != self._digests[name].sha256[number]:
            file = f"{stored.path.parent.name}/{stored.path.name}"
            raise DamagedError(f"tensor {name} in {file} is not what was saved")

    def _range(self, name: str, number: int) -> tuple[int, int]:
        """First and last byte of a chunk."""
        each, nbytes = self._each(name), self.stored_spec(name).nbytes
        return number * each, min((number + 1) * each, nbytes)

    def _each(self, name: str) -> int:
        """Bytes of a chunk."""
        if self._digests is None:
            return chunk_bytes(self.stored_spec(name).nbytes)
        return self._digests[name].each

    def _elements(self, name: str) -> int:
        """Elements of a chunk."""
        return max(self._each(name) // self.stored_spec(name).dtype.itemsize, 1)

    def _count(self, name: str) -> int:
        """How many chunks there are."""
        return -(-self.stored_spec(name).nbytes // self._each(name))


def _whole(spec: TensorSpec) -> Part:
    """A tensor that is in one part."""
    shape = spec.shape
    size = spec.nbytes // spec.dtype.itemsize
    return Part(shape, tuple(range(len(shape))), (0,) * len(shape), shape, 0, size)
