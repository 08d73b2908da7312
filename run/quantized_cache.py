"""Cache of quantized frozen weights, in a run folder or a shared folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from checkpoints import CheckpointError, TensorFiles
from checkpoints.lazy_arrays import Arrays, ArraysView, OverlayArrays
from checkpoints.safetensors_files import (
    sha256_of_array,
    sha256_of_bytes,
    to_c_order,
    write_safetensors,
)
from config.sections import RunConfig
from files.atomic_writing import write_file_atomically
from files.errors import WriteError
from files.formatting import format_path
from files.run_folder import RunFolder
from terminal.screen import say

_FORMAT = "2"
"""Version of the quantized format."""

_DIGEST = "sha256"  # tensor name of the digest of the others


def with_quantized_cache(
    config: RunConfig, tensors: Arrays, known_hashes: Mapping[str, str]
) -> Arrays:
    """Return tensors whose quantized values are cached in the configured folder.

    Args:
        known_hashes: digests of tensors, which then need not be read; can grow as tensors are read.
    """
    save, shared = config.checkpoint.save, config.execution.quantized_cache
    if config.model.quant is None or not (save or shared):
        return tensors
    folder = Path(shared) if shared else RunFolder(Path(save or "")).quantized_weights_folder
    return QuantizedCache(tensors, known_hashes, folder)


class QuantizedCache(ArraysView):
    """Mapping of tensors that also stores their quantized values in a cache folder.

    A file is named by a digest of the tensors that it was computed from, so that another base model
    has other files. A damaged file is computed again.
    """

    def __init__(self, tensors: Arrays, known_digests: Mapping[str, str], folder: Path) -> None:
        """Wrap tensors; with a known digest and a cache file, a tensor is not read."""
        super().__init__(tensors)
        self._known, self._folder = known_digests, folder
        self._write_failed = False

    def get_quantized(
        self, names: Sequence[str], key: str, compute: Callable[[Arrays], Sequence[np.ndarray]]
    ) -> Sequence[np.ndarray]:
        """Return the quantized values of tensors, read from the cache or newly computed."""
        read = {name: self[name] for name in names if name not in self._known}
        digests = [self._known[name] if name in self._known else sha256_of_array(read[name])
                   for name in names]  # fmt: skip
        file_key = sha256_of_bytes("\n".join((_FORMAT, key, *digests)).encode())
        path = self._folder / f"{file_key[:32]}.safetensors"
        cached = _read_cached(path)
        if cached is not None:
            return cached
        arrays = compute(OverlayArrays(read, self))
        if not self._write_failed:
            self._write(path, arrays)
        return arrays

    def _write(self, path: Path, arrays: Sequence[np.ndarray]) -> None:
        """Write a cache file of quantized values; after a failure it warns and writes no more."""
        try:
            write_file_atomically(
                "packed weights to",
                path,
                lambda draft: write_safetensors(draft, _with_sha256(arrays)),
            )
        except WriteError as error:
            self._write_failed = True
            say(f"warning: {error}; the next start quantizes again")


def _with_sha256(arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    stored = {str(n): to_c_order(str(n), array) for n, array in enumerate(arrays)}
    return {**stored, _DIGEST: _arrays_sha256(arrays)}


def _arrays_sha256(arrays: Sequence[np.ndarray]) -> np.ndarray:
    text = " ".join(f"{a.dtype} {a.shape} {sha256_of_array(a)}" for a in arrays)
    return np.frombuffer(bytes.fromhex(sha256_of_bytes(text.encode())), np.uint8)


def _read_cached(path: Path) -> Sequence[np.ndarray] | None:
    """Read a cache file of quantized values; returns None if it is missing or damaged."""
    try:
        if not path.exists():
            return None
        files = TensorFiles([path])
        arrays = [files[str(n)] for n in range(len(files) - 1)]
        if np.array_equal(files[_DIGEST], _arrays_sha256(arrays)):
            return arrays
    except (CheckpointError, KeyError, OSError):
        pass
    say(f"warning: {format_path(path)} is damaged: it is computed again")
    return None
