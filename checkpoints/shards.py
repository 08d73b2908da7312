"""Writing tensors to safetensors files of a limited size, in little more memory than one file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import popdist
from checkpoints.parts import TensorPart
from checkpoints.tensor_files import DTYPES
from files.shown import shown_name
from files.writing import sync

RESERVED_NAME = "__metadata__"  # of the format


def as_stored(name: str, tensor: np.ndarray) -> np.ndarray:
    """The tensor as an array in C order, without a copy if it is one.

    Raises:
        TypeError: for a dtype that cannot be stored.
        ValueError: for a name that cannot be.
    """
    array = np.asarray(tensor, order="C")
    if array.dtype not in DTYPES.values():
        supported = ", ".join(dtype.name for dtype in DTYPES.values())
        raise TypeError(f"tensor {name} is {array.dtype}, but can only be one of {supported}")
    if name == RESERVED_NAME or name.encode(errors="ignore").decode() != name:
        raise ValueError(f"no tensor can be named {shown_name(name)} in a safetensors file")
    return array


def own_share(tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that this process stores, of several processes that all have them.

    Every process takes each from the mapping, in the same order, since it may be a value that
    devices of all of them hold.
    """
    shares = _Shares()
    for name in tensors:
        array = as_stored(name, tensors[name])
        if shares.take(array.nbytes, range(popdist.getNumInstances())):
            yield name, array


def own_parts(parts: Iterable[tuple[str, TensorPart]]) -> Iterator[tuple[str, np.ndarray]]:
    """The parts of tensors that this process stores, under their names, of those it holds."""
    shares = _Shares()
    for name, held in parts:
        if shares.take(held.part.size * held.dtype.itemsize, held.processes):
            yield name, as_stored(name, held.read())


class _Shares:
    """What each process stores: what several have, the one of them that has least to store."""

    def __init__(self) -> None:
        self._bytes = [0] * popdist.getNumInstances()

    def take(self, nbytes: int, processes: Sequence[int]) -> bool:
        """Whether this process stores what some of them have."""
        owner = min(processes, key=self._bytes.__getitem__)
        self._bytes[owner] += nbytes
        return owner == popdist.getInstanceIndex()


def shards_of(
    tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    """Split named tensors, in their order, into dictionaries of at most `shard_bytes` bytes.

    A larger tensor has one for itself. Tensors are taken when their turn comes, and a dictionary is
    emptied when the next one is asked for: if arrays are made when they are taken, only one shard
    of them exists at a time.
    """
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, array in tensors:
        if shard and size + array.nbytes > shard_bytes:
            yield shard
            shard.clear()
            size = 0
        shard[name] = array
        size += array.nbytes
    if shard:
        yield shard


def write_shard(path: Path, shard: dict[str, np.ndarray]) -> None:
    """Write a safetensors file that survives a loss of power."""
    # Readers in transformers ask for the framework; "pt" is the only one they all know.
    save_file(shard, path, metadata={"format": "pt"})
    sync(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that survives a loss of power."""
    write_synced(path, json.dumps(content, indent=2) + "\n")


def write_synced(path: Path, text: str) -> None:
    """Write a text file that survives a loss of power."""
    path.write_text(text, encoding="utf-8")
    sync(path)
