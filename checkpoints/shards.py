"""Writing tensors to safetensors files of a limited size, in little more memory than one file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from checkpoints.stored import DTYPES
from files.drafts import sync
from files.shown import shown_name
from files.writing import os_errors, write_synced

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


def write_shard(
    path: Path, shard: dict[str, np.ndarray], metadata: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write a safetensors file that survives a loss of power, for all who read its folder.

    Raises:
        OSError: it cannot be written.
    """
    with os_errors():
        # Readers in transformers ask for the framework; "pt" is the only one they all know.
        save_file(shard, path, metadata={"format": "pt", **metadata})
    # The library leaves it to its owner alone. A folder that was made here follows the umask,
    # which cannot be read without changing it for all threads.
    path.chmod(path.parent.stat().st_mode & 0o666)
    sync(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that survives a loss of power."""
    write_synced(path, json.dumps(content, indent=2) + "\n")
