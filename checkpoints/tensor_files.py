"""Reading safetensors files tensor by tensor, checked against digests where there are any."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from checkpoints.digests import Digests, chunk_bytes, digest_of_bytes
from checkpoints.errors import CheckpointError, DamagedError
from checkpoints.parts import Part
from checkpoints.ranges import StoredParts, chunks_needed
from checkpoints.stored import Stored, TensorSpec, tensors_in
from files.lazy import Lazy

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


def fingerprint_of(files: Iterable[Path]) -> str:
    """A digest of files' names, sizes and first megabytes."""
    sha256 = hashlib.sha256()
    for path in sorted(files):
        with path.open("rb") as file:
            sha256.update(f"{path.name} {path.stat().st_size}\n".encode())
            sha256.update(file.read(2**20))
    return sha256.hexdigest()


class TensorFiles(Lazy[np.ndarray]):
    """The tensors of some safetensors files by name; each access reads one from disk.

    The files are opened at once and stay open, so that deleting them (as a running training does
    with old checkpoints) does not disturb. An array that was read belongs to the caller.

    Attributes:
        absent: the file of each tensor that an index names and no file has.
    """

    def __init__(
        self,
        files: Iterable[Path],
        digests: Mapping[str, Digests] | None = None,
        skipped: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Open `files`.

        Args:
            files: safetensors files without a tensor's name in common.
            digests: of every tensor in them; reading another value is then an error.
            skipped: whether the tensor of a name is passed over, whatever its type and shape.

        Raises:
            CheckpointError: if a file is missing or damaged, or names do not fit.
        """
        stored: dict[str, Stored] = {}
        for path in files:
            for one in tensors_in(path):
                if skipped(one.name):
                    continue
                if one.name in stored:
                    raise CheckpointError(
                        f"tensor {one.name} is in {stored[one.name].path} and also in {path.name}"
                    )
                stored[one.name] = one
        super().__init__(stored)
        self._files, self._digests = stored, digests
        self.absent: Mapping[str, str] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        """Read one tensor.

        Raises:
            KeyError: if there is none of that name.
            DamagedError: if it cannot be read, or is not what its digest says.
        """
        return self._read(name)

    def some(self, name: str, wanted: Sequence[Part]) -> np.ndarray:
        """Read of one tensor the chunks that have the elements of the parts `wanted`.

        Returns:
            The tensor; elements outside of these chunks are 0.

        Raises:
            KeyError, DamagedError: as when all of it is read.
        """
        span = StoredParts(self._elements(name), ((0, _whole(self.spec(name))),))
        (chunks,) = chunks_needed(tuple(wanted), (span,))
        return self._read(name, chunks)

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of a tensor, without reading it.

        Raises:
            KeyError: if there is none of that name.
            CheckpointError: for a dtype that NumPy lacks.
        """
        return self._stored_spec(name)

    def opened(self, name: str) -> tuple[Stored, Digests | None]:
        """What is stored under a name in the files, and its digests if there are any."""
        return self._files[name], self._digests[name] if self._digests is not None else None

    def _stored_spec(self, name: str) -> TensorSpec:
        """Dtype and shape of what is stored under a name in the files."""
        return self._files[name].spec

    def _stored_names(self) -> Collection[str]:
        """The names in the files."""
        return self._files

    def fingerprint(self) -> str:
        """A digest of the files' sizes and first megabytes, which tells most models apart."""
        return fingerprint_of({one.path for one in self._files.values()})

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

        chunks = [(name, i) for name in self._stored_names() for i in range(self._count(name))]
        with readers() as pool:
            for _ in pool.map(read, chunks[part::parts]):
                pass

    # ---- chunks ---------------------------------------------------------------------------------
    def _read(self, name: str, chunks: Iterable[int] | None = None) -> np.ndarray:
        """A tensor in the files; elements outside of the chunks, if these are given, are 0."""
        spec = self._stored_spec(name)
        content = np.zeros(spec.nbytes, np.uint8)
        for number in range(self._count(name)) if chunks is None else chunks:
            start, end = self._range(name, number)
            self._read_chunk(name, number, content.data[start:end])
        return content.view(spec.dtype).reshape(spec.shape)

    def _read_chunk(self, name: str, number: int, memory: memoryview) -> None:
        """Read a chunk, and compare it with its digest."""
        stored, digests = self.opened(name)
        stored.read_into(memory, number * self._each(name))
        if digests is not None and digest_of_bytes(memory) != digests.sha256[number]:
            file = f"{stored.path.parent.name}/{stored.path.name}"
            raise DamagedError(f"tensor {name} in {file} is not what was saved")

    def _range(self, name: str, number: int) -> tuple[int, int]:
        """First and last byte of a chunk."""
        each, nbytes = self._each(name), self._stored_spec(name).nbytes
        return number * each, min((number + 1) * each, nbytes)

    def _each(self, name: str) -> int:
        """Bytes of a chunk."""
        return chunk_bytes(self._stored_spec(name).nbytes)

    def _elements(self, name: str) -> int:
        """Elements of a chunk."""
        return max(self._each(name) // self._stored_spec(name).dtype.itemsize, 1)

    def _count(self, name: str) -> int:
        """How many chunks there are."""
        return -(-self._stored_spec(name).nbytes // self._each(name))


def _whole(spec: TensorSpec) -> Part:
    """A tensor that is in one part."""
    shape = spec.shape
    size = spec.nbytes // spec.dtype.itemsize
    return Part(shape, tuple(range(len(shape))), (0,) * len(shape), shape, 0, size)
