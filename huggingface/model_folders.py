"""Model folders in the format of transformers' `save_pretrained`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.safetensors_files import split_by_bytes, to_c_order, write_safetensors
from checkpoints.tensor_files import TensorFiles, is_file_name
from files.atomic_writing import check_can_write_folder, wrap_write_errors, write_json
from files.errors import FileError, UserError, WriteError
from files.formatting import format_names
from files.json_files import read_json_object
from files.temp_folders import atomic_path
from huggingface.generation_config import GENERATION_CONFIG, make_generation_config
from huggingface.ignored_tensors import is_ignored_tensor
from huggingface.pytorch_bin_files import (
    BIN_INDEX,
    SINGLE_BIN,
    BinTensors,
    has_bin_files,
    has_torch,
)

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TASK_PARAMS, TASK_NAME = "task_specific_params", "fine-tuned"
"""Field of config.json for a fine-tuned model's task, and the task's name in it."""
TASK_FIELDS = (
    "prompt",
    "target",
    "source_language",
    "target_language",
    "class_labels",
    "separator",
    "format",
    "system",
    "chat_variables",
)
SHARD_BYTES = 5 * 10**9
OTHER_FORMATS = ("pytorch_model*.bin", "tf_model.h5", "flax_model.msgpack")
WEIGHT_PATTERNS = (
    *OTHER_FORMATS,
    "*.safetensors",
    "*.gguf",
    "consolidated*",
    "*.pt",
    "*.onnx",
    "*.ot",
)
"""Patterns of files that can hold weights."""

ModelFiles = TensorFiles | BinTensors
"""Weights of a model, in safetensors or in .bin files."""


def is_hf_directory(path: str | Path) -> bool:
    """True if a folder has a config.json or weights in a Hugging Face format."""
    path = Path(path)
    patterns = (CONFIG, "*.safetensors", *OTHER_FORMATS)
    return any(next(path.glob(pattern), None) for pattern in patterns)


def has_weights(path: Path) -> bool:
    """True if a folder has weights that `read_hf_directory` can read."""
    return _has_safetensors(path) or (has_bin_files(path) and has_torch())


def read_hf_directory(path: str | Path) -> ModelFiles:
    """Open the weights of a model folder as a lazy mapping by Hugging Face name.

    Each access reads one tensor.

    Tied weights, such as `encoder.embed_tokens.weight` of T5, may be there under one name only.
    Tensors that are no weights are left out.

    Raises:
        CheckpointError: if there is no folder, or no complete set of safetensors or bin files in
            it.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(
            f"no model in {path}: give a Hugging Face model folder with {CONFIG} and {WEIGHTS}"
        )
    if not _has_safetensors(path) and has_bin_files(path):
        _check_torch_for_bin_files(path)
        try:
            return BinTensors(path)
        except UserError as error:
            raise CheckpointError(str(error)) from error
    files, index = _find_safetensors(path)
    tensors = TensorFiles(files, skip=is_ignored_tensor)
    tensors.missing = {name: file for name, file in index.items() if name not in tensors}
    return tensors


def read_hf_config(path: str | Path) -> dict[str, Any] | None:
    """Content of a folder's config.json; None if the file is missing.

    Raises:
        CheckpointError: it is damaged.
    """
    file = Path(path) / CONFIG
    if not file.exists():
        return None
    try:
        return read_json_object(file).data
    except FileError as error:
        raise CheckpointError(f"{CONFIG} is damaged: {error}") from error


def write_hf_directory(
    path: str | Path,
    tensors: Mapping[str, np.ndarray],
    config_json: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
    add_files: Callable[[Path], object] | None = None,
    generation: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write a model folder that transformers' `from_pretrained` loads.

    Args:
        path: see `new_model_folder`; it may be there if it is empty.
        tensors: arrays by Hugging Face name. Each is taken when its turn comes to be written.
        config_json: content of config.json; the weights' type is added. Those of its tokens that
            generation needs go to generation_config.json too, where transformers looks for them.
        shard_bytes: size above which the weights are split into several files.
        add_files: adds further files, such as a tokenizer's, to the folder it is given.
        generation: what generation_config.json has besides.

    Raises:
        CheckpointError: see `new_model_folder`.
        TypeError: for a dtype that cannot be stored.
    """
    with new_model_folder(path) as draft:
        write_json(draft / GENERATION_CONFIG, make_generation_config(generation, config_json))
        dtype = _write_weights(draft, tensors, shard_bytes)
        write_json(draft / CONFIG, {**config_json, "dtype": dtype})
        if add_files is not None:
            add_files(draft)


@contextmanager
def new_model_folder(path: str | Path) -> Iterator[Path]:
    """Context with a temporary folder for a model's files, renamed to `path` at the end.

    Raises:
        CheckpointError: `path` is there and not empty, or cannot be written.
    """
    path = Path(os.path.abspath(path))
    check_can_write_folder_to(path)
    try:
        with wrap_write_errors("the model folder", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(path) as draft:
                draft.mkdir()
                yield draft
    except WriteError as error:
        raise CheckpointError(str(error)) from error


def check_can_write_folder_to(path: str | Path) -> None:
    """Check that a model folder can be written to `path`.

    Raises:
        CheckpointError: something is there, and it is no empty folder, or it cannot be written.
    """
    path = Path(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(
            f"{path} is there and is not empty: give a new folder for the model, or delete that one"
        )
    try:
        check_can_write_folder("the model folder", path)
    except WriteError as error:
        raise CheckpointError(str(error)) from error


def _has_safetensors(path: Path) -> bool:
    return (path / WEIGHTS).is_file() or (path / INDEX).is_file()


def list_weight_files(path: Path) -> list[str]:
    """Names of a model's weight files: those in its index, else the only bin file.

    The folder may not have the files yet.

    Raises:
        UserError: they are bin files, and torch is not installed.
    """
    if (path / INDEX).is_file():
        return sorted(set(_read_index(path / INDEX).values()))
    _check_torch_for_bin_files(path)
    if (path / BIN_INDEX).is_file():
        return sorted(set(_read_index(path / BIN_INDEX).values()))
    return [SINGLE_BIN]


def _check_torch_for_bin_files(path: Path) -> None:
    if not has_torch():
        raise CheckpointError(
            f"{path} has no {WEIGHTS}, and torch, which reads {SINGLE_BIN}, is not installed: pip "
            f"install torch, or elsewhere python3 -m huggingface.convert {path} NEW_FOLDER"
        )


def _read_index(file: Path) -> Mapping[str, str]:
    """Read a weight index (JSON): file name of each tensor."""
    try:
        index = read_json_object(file).get_text_dict("weight_map")
    except FileError as error:
        raise CheckpointError(f"{file.name} is damaged: {error}") from error
    if not all(map(is_file_name, index.values())):
        raise CheckpointError(f"{file} is damaged: it names files of other folders")
    return index


def _find_safetensors(path: Path) -> tuple[list[Path], Mapping[str, str]]:
    """Safetensors files of a model, single or listed in an index, and the index.

    Others are not looked for: without an index nobody knows whether some are missing.
    """
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS], {}
    if (path / INDEX).is_file():
        index = _read_index(path / INDEX)
        return [path / file for file in sorted(set(index.values()))], index
    other_files = sorted({file.name for pattern in WEIGHT_PATTERNS for file in path.glob(pattern)})
    note = f" (there is {format_names(other_files)}, which is not read)" if other_files else ""
    raise CheckpointError(f"neither {WEIGHTS} nor {INDEX} found in {path}{note}")


def _write_weights(folder: Path, tensors: Mapping[str, np.ndarray], shard_bytes: int) -> str:
    """Write weights as safetensors shards; returns the dtype that most elements have."""
    shards: list[list[str]] = []
    sizes, total = Counter[str](), 0
    stored = ((name, to_c_order(name, tensors[name])) for name in tensors)
    for shard in split_by_bytes(stored, shard_bytes):
        write_safetensors(folder / str(len(shards)), shard)
        shards.append(list(shard))
        for array in shard.values():
            sizes[array.dtype.name] += array.size
            total += array.nbytes
    dtype = max(sizes, key=sizes.__getitem__, default="float32")
    # Their names contain their number, which is known only now.
    if len(shards) == 1:
        os.rename(folder / "0", folder / WEIGHTS)
        return dtype
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(folder / str(number), folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return dtype
