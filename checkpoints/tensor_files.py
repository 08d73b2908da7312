"""Reading safetensors files tensor by tensor, checked against digests where there are any."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints.errors import CheckpointError
from checkpoints.layouts import Piece
from checkpoints.parts import assembled
from files.shown import shown_name, shown_path

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""Those that both safetensors and NumPy (with ml_dtypes) can hold, by safetensors' names."""

# SHA-256 does about 1.2 GB/s on one core; more threads than this wait for the disk.
MOST_READERS = 4


class TensorSpec(NamedTuple):
    """What a tensor is, without its values."""

    dtype: np.dtype
    shape: tuple[int, ...]


def digest(array: np.ndarray) -> str:
    """SHA-256 of the elements in C order, as hexadecimal digits."""
    # As bytes, since bfloat16 does not support the buffer protocol.
    flat = np.asarray(array, order="C").reshape(-1)
    return hashlib.sha256(flat.view(np.uint8).data).hexdigest()


def digest_of_bytes(content: bytes) -> str:
    """SHA-256 of a file's content, as hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


@contextmanager
def readers() -> Iterator[ThreadPoolExecutor]:
    """Threads to read and digest with; what they have not begun when the context ends is left."""
    pool = ThreadPoolExecutor(min(MOST_READERS, os.cpu_count() or 1))
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
        digests: Mapping[str, str] | None = None,
        pieces: Mapping[str, Sequence[Piece]] | None = None,
    ) -> None:
        """Open `files`.

        Args:
            files: safetensors files without a tensor's name in common.
            digests: `digest` of every tensor in them; reading another value is then an error.
            pieces: of tensors that are made of some in the files, by name.

        Raises:
            CheckpointError: if a file is missing or damaged, or names do not fit.
        """
        self._files: dict[str, tuple[safe_open, Path]] = {}
        for path in files:
            file = _open(path)
            for name in file.keys():  # noqa: SIM118 - no mapping
                if name in self._files:
                    raise CheckpointError(
                        f"tensor {name} is in {self._files[name][1]} and also in {path.name}"
                    )
                self._files[name] = (file, path)
        self._digests, self._pieces = digests, dict(pieces or {})
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
        self._names = [name for name in self._files if name not in inside] + list(self._pieces)

    def __getitem__(self, name: str) -> np.ndarray:
        """Read one tensor.

        Raises:
            KeyError: if there is none of that name.
            CheckpointError: if it cannot be read, or is not what its digest says.
        """
        if name not in self._pieces:
            return self._stored(name)
        pieces = self._pieces[name]
        arrays = {stored: self._stored(stored) for stored in {piece.stored for piece in pieces}}

        def elements(piece: Piece) -> np.ndarray:
            return arrays[piece.stored][piece.start : piece.start + piece.part.size]

        return assembled({piece.part: partial(elements, piece) for piece in pieces})

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

    def _stored(self, name: str) -> np.ndarray:
        file, path = self._files[name]
        try:
            array: np.ndarray = file.get_tensor(name)
        except (SafetensorError, OSError, AttributeError) as error:
            # The last for a dtype that NumPy lacks.
            raise CheckpointError(f"cannot read tensor {name} of {path}: {error}") from error
        if self._digests is not None and digest(array) != self._digests[name]:
            raise CheckpointError(f"tensor {name} in {path} is not what was saved")
        return array

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
        file, path = self._files[name]
        part = file.get_slice(name)
        if part.get_dtype() not in DTYPES:
            raise CheckpointError(
                f"tensor {shown_name(name)} of {shown_path(path)} is {part.get_dtype()}, which is "
                f"not supported; there are: {', '.join(DTYPES)}"
            )
        return TensorSpec(DTYPES[part.get_dtype()], tuple(part.get_shape()))

    def fingerprint(self) -> str:
        """A digest of the files' sizes and first megabytes, which tells most models apart."""
        found = hashlib.sha256()
        for path in sorted({path for _, path in self._files.values()}):
            with path.open("rb") as file:
                found.update(f"{path.name} {path.stat().st_size}\n".encode())
                found.update(file.read(2**20))
        return found.hexdigest()

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Read every tensor once, in order to compare it with its digest.

        No more tensors than `MOST_READERS` are in memory at a time.

        Args:
            part, parts: read only the tensors of one of so many parts.

        Raises:
            CheckpointError: about the first that is not what was saved.
        """

        def read(name: str) -> None:
            self._stored(name)

        with readers() as pool:
            for _ in pool.map(read, list(self._files)[part::parts]):
                pass


def _open(path: Path) -> safe_open:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        # `pread` rather than a memory map: what was read does not stay in the process's memory,
        # and a file that is cut short meanwhile gives an error and not a bus error.
        return safe_open(path, framework="np", backend="pread")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
