"""Files of variables' arrays in a folder, with a JSON index of shapes and dtypes.

NumPy has no name for bfloat16 and float8, so .npz files hold their bits as integers; memory maps
are bytes without a header. `arrays.json` says the dtype and shape of each variable. A variable that
it does not name was saved by another program: its file is taken for what the variable is, as far as
its size and type allow.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from popxl import dtypes

INDEX = "arrays.json"


class StoredArray(NamedTuple):
    """Index entry of an array that a checkpoint folder stores: file, shape, dtype.

    Attributes:
        file: its name.
        dtype: its name in PopXL.
        offset: bytes before the elements of a memory map.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @classmethod
    def from_array(cls, file: str, array: np.ndarray) -> StoredArray:
        """Returns the index entry of an array that is stored in a file."""
        offset = int(array.offset) if isinstance(array, np.memmap) else 0
        return cls(file, dtypes.dtype.as_dtype(array.dtype).name, array.shape, offset)

    @classmethod
    def from_json(cls, entry: Any) -> StoredArray:
        """Returns an index entry from JSON data; raises TypeError or ValueError if malformed."""
        file, dtype, shape, offset = entry
        known = dtypes.dtype.from_name(dtype).name
        return cls(str(file), known, tuple(int(n) for n in shape), int(offset))

    @property
    def nbytes(self) -> int:
        """File size in bytes of a memory map up to the end of the array."""
        return self.offset + self.host_dtype.itemsize * math.prod(self.shape)

    @property
    def host_dtype(self) -> np.dtype:
        """NumPy dtype of the array's elements."""
        return dtypes.dtype.from_name(self.dtype).as_numpy()


# ---- the index ----------------------------------------------------------------------------------
def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; an empty one if the file does not exist.

    Raises:
        ValueError: the file is damaged.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise TypeError("it holds no JSON object")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): restore it, or remove it") from error
    return found


def read_index(folder: Path) -> dict[str, StoredArray]:
    """Returns the index of a folder: an entry by name of each stored variable.

    Raises:
        ValueError: the index is damaged.
    """
    path = folder / INDEX
    entries = read_object(path)
    try:
        return {name: StoredArray.from_json(entry) for name, entry in entries.items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): restore it, or remove it") from error


def add_to_index(folder: Path, entries: Mapping[str, StoredArray]) -> None:
    """Merges entries into a folder's index file."""
    path, draft = folder / INDEX, folder / f".{INDEX}"
    draft.write_text(json.dumps(read_index(folder) | dict(entries), indent=1), encoding="utf-8")
    draft.replace(path)


# ---- files --------------------------------------------------------------------------------------
def file_dtype(dtype: np.dtype) -> np.dtype:
    """Dtype in which .npy files store `dtype`: bfloat16 and float8 as unsigned integers."""
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")


def read_packed(folder: Path, name: str, index_entry: StoredArray) -> np.ndarray:
    """Returns the named array from an .npz file (compressed checkpoints).

    Args:
        index_entry: the index entry, or the expected one if the index has none.

    Raises:
        ValueError: the file is damaged, or has no such array.
    """
    path = folder / index_entry.file
    try:
        with np.load(path, allow_pickle=False) as arrays:
            array: np.ndarray = arrays[name]
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read as the array {name!r}: {error}") from error
    dtype = index_entry.host_dtype
    return array.view(dtype) if array.dtype == file_dtype(dtype) != dtype else array


def map_file(
    folder: Path, index_entry: StoredArray, mode: str = "r", size: int | None = None
) -> np.memmap:
    """Returns a memory map of an array file.

    Args:
        size: bytes that the file must have; None: those of the array, or more.

    Raises:
        ValueError: it has others.
    """
    path = folder / index_entry.file
    found = path.stat().st_size
    if found < index_entry.nbytes if size is None else found != size:
        raise ValueError(
            f"{path} has {found} bytes, but {index_entry.dtype} of shape {index_entry.shape} needs "
            f"{index_entry.nbytes if size is None else size}"
        )
    dtype: Any = index_entry.host_dtype
    return np.memmap(path, dtype, mode, index_entry.offset, index_entry.shape)  # type: ignore[call-overload]


# ---- conversions --------------------------------------------------------------------------------
def check_conversion(name: str, source: str, array: np.ndarray, dtype: np.dtype) -> None:
    """Raises ValueError unless a stored array can be converted to the variable's dtype.

    Args:
        name: of the variable; `source`: what the array comes from, for the message.
        dtype: of the variable.

    Raises:
        ValueError: one holds fractions, truth values or float8 and the other does not, or numbers
            are too large.
    """
    if array.dtype == dtype:
        return
    kinds = _dtype_kind(array.dtype), _dtype_kind(dtype)
    src, dst = (dtypes.dtype.as_dtype(d).name for d in (array.dtype, dtype))
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"{source} holds {src} for {name!r}, but the variable is {dst}: convert it first"
        )
    if kinds[0] == "f" and not np.can_cast(array.dtype, dtype):
        with np.errstate(over="ignore"):
            lost = np.isfinite(array) & ~np.isfinite(array.astype(dtype))
        if lost.any():
            raise ValueError(
                f"{source} holds numbers for {name!r}, {src}, that the variable's {dst} does "
                "not reach"
            )


def _dtype_kind(dtype: np.dtype) -> str:
    """Category of a dtype (such as float or int): arrays can be converted within one category."""
    kind = dtypes.dtype.as_dtype(dtype)
    if kind.is_int:
        return "i"
    return "f" if kind.is_floating_point and kind.itemsize > 1 else kind.name
