"""Weights in pytorch_model.bin files, loaded without running code from the files."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.lazy_arrays import LazyArrays
from checkpoints.safetensors_files import ArraySpec, to_c_order
from checkpoints.tensor_files import fingerprint_files, is_file_name
from config.errors import UserError
from files.errors import FileError
from files.formatting import format_name, format_path
from files.json_files import read_json_object
from files.text_files import check_not_lfs_pointer, check_regular_file
from huggingface.ignored_tensors import is_ignored_tensor

SINGLE_BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def has_bin_files(folder: Path) -> bool:
    """True if a folder has a complete set of PyTorch's .bin weight files."""
    return (folder / SINGLE_BIN).exists() or (folder / BIN_INDEX).exists()


def has_torch() -> bool:
    """True if torch is installed."""
    from transformers.utils import is_torch_available

    return bool(is_torch_available())


class BinTensors(LazyArrays):
    """Lazy mapping from weight names to the tensors in .bin files.

    torch maps the files into memory; those of before torch 1.6 it reads whole.

    Attributes:
        missing: file of each tensor that the index lists and no file has.
    """

    def __init__(self, folder: Path) -> None:
        """Open the .bin files of a folder; tensors are memory-mapped.

        Raises:
            UserError: a file is missing, cannot be read, or holds more than tensors.
        """
        self.paths, index = _find_bin_files(folder)
        self._tensors: dict[str, tuple[Any, Path]] = {}
        for path in self.paths:
            for name, value in _load_state_dict(path).items():
                if is_ignored_tensor(name):
                    continue
                if name in self._tensors:
                    raise UserError(
                        f"{format_path(path)} has {format_name(name)}, as another file has"
                    )
                _check_tensor(value, name, path)
                self._tensors[name] = value, path
        self._names = self._tensors
        self.missing = {name: file for name, file in index.items() if name not in self._tensors}

    def __getitem__(self, name: str) -> np.ndarray:
        """Read one tensor. Raises UserError if its name or dtype is not supported."""
        value, path = self._tensors[name]
        return _to_numpy(value, name, path)

    def spec(self, name: str) -> ArraySpec:
        """Dtype and shape of the tensor of this name. Raises as reading does."""
        value, path = self._tensors[name]
        dtype = _to_numpy(value.new_empty(0), name, path).dtype
        return ArraySpec(dtype, tuple(value.shape))

    def fingerprint(self) -> str:
        """Hash of the files' names, sizes and first megabytes."""
        return fingerprint_files(self.paths)


def _find_bin_files(folder: Path) -> tuple[list[Path], Mapping[str, str]]:
    """The .bin files of a model, in transformers' order of preference, and their index."""
    if (folder / SINGLE_BIN).exists():
        return [folder / SINGLE_BIN], {}
    if not (folder / BIN_INDEX).exists():  # then nobody knows whether some are missing
        raise UserError(
            f"neither {SINGLE_BIN} nor {BIN_INDEX} found in {format_path(folder)}: give the "
            "folder of a model in that form"
        )
    index = read_json_object(folder / BIN_INDEX).get_text_dict("weight_map")
    if not all(map(is_file_name, index.values())):
        raise UserError(
            f"{format_path(folder / BIN_INDEX)} is damaged: it names files of other folders"
        )
    return [folder / name for name in sorted(set(index.values()))], {
        name: file for name, file in index.items() if not is_ignored_tensor(name)
    }


def _load_state_dict(path: Path) -> dict[str, Any]:
    """Load a PyTorch state dict with `weights_only=True`, which runs no code of the file."""
    import torch

    check_regular_file(path)
    check_not_lfs_pointer(path)
    try:
        use_mmap = zipfile.is_zipfile(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=use_mmap)
    except OSError as error:
        raise FileError(f"cannot read {format_path(path)}: {error.strerror or error}") from error
    except Exception as error:  # torch raises many kinds for a damaged file
        raise FileError(
            f"cannot read {format_path(path)}: it is damaged, no file of torch.save, or holds more "
            "than tensors"
        ) from error
    if not isinstance(state, dict) or not state or not all(isinstance(n, str) for n in state):
        raise FileError(f"{format_path(path)} holds no tensors by name: give a model's state_dict")
    return state


def _check_tensor(value: Any, name: str, path: Path) -> None:
    import torch

    description = f"{format_name(name)} of {format_path(path)}"
    if not isinstance(value, torch.Tensor):
        raise UserError(f"{description} is no tensor: give the file of a model alone")
    if value.layout != torch.strided:
        raise UserError(f"{description} is sparse, and cannot be converted")


def _to_numpy(value: Any, name: str, path: Path) -> np.ndarray:
    import ml_dtypes
    import torch

    tensor = value.detach().contiguous()
    is_bfloat16 = tensor.dtype == torch.bfloat16
    try:
        array: np.ndarray = (tensor.view(torch.int16) if is_bfloat16 else tensor).numpy()
        return to_c_order(name, array.view(ml_dtypes.bfloat16) if is_bfloat16 else array)
    except TypeError as error:  # such as float8 or complex numbers
        description = f"{format_name(name)} of {format_path(path)}"
        raise UserError(f"{description} is {tensor.dtype}, which cannot be converted") from error
    except ValueError as error:
        raise UserError(f"{format_path(path)}: {error}") from error
