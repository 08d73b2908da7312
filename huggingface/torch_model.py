"""Hugging Face's model on torch with our weights, for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.manifest import is_file_name
from checkpoints.shards import as_stored
from config.errors import UserError
from files.errors import FileError
from files.json_files import read_object
from files.shown import shown_name, shown_path
from files.text import check_regular
from huggingface.no_weights import is_no_weight

NEEDS_TORCH = (
    "Hugging Face's model runs on torch, which is not installed: "
    "pip install -r requirements-dev.txt"
)


def has_torch() -> bool:
    """Whether torch, which runs Hugging Face's models, is installed."""
    from transformers.utils import is_torch_available

    return bool(is_torch_available())


def need_torch() -> None:
    """Raise UserError unless torch is installed."""
    if not has_torch():
        raise UserError(NEEDS_TORCH)


def model_of(description: Mapping[str, Any], dtype: str, weights: Mapping[str, np.ndarray]) -> Any:
    """A model of transformers, in evaluation mode.

    It is made as `from_pretrained` makes it from the files of --save-hf, without the files.

    Args:
        description: content of its config.json.
        dtype: name of the type it computes in.
        weights: whole weights by Hugging Face name, any floating-point type; each is read once and
            copied.
    """
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()  # it warns of weights that are not tied
    transformers.utils.logging.disable_progress_bar()
    architecture = getattr(transformers, description["architectures"][0])
    precision = getattr(torch, dtype)
    # Through float32, which holds every value of the types that torch does not take from NumPy.
    state = {
        name: torch.tensor(np.asarray(weights[name], np.float32)).to(precision) for name in weights
    }
    model, report = architecture.from_pretrained(
        None,
        config=architecture.config_class.from_dict(dict(description)),
        state_dict=state,
        dtype=precision,
        output_loading_info=True,
    )
    assert not report["missing_keys"], f"we have no {report['missing_keys']}"
    return model.eval()


def generate(
    model: Any, words: np.ndarray, length: int, mask: np.ndarray | None = None
) -> np.ndarray:
    """Greedy generation by transformers.

    Args:
        words: int [n, prompt length].
        length: of new tokens, at most.
        mask: same shape, 1 where there is a token; by default everywhere. A language model without
            an encoder wants its padding on the left, unlike ours.

    Returns:
        int [n, up to length], the new tokens; padding after a row's end token.
    """
    import torch

    ids = torch.as_tensor(words).long()
    there = torch.ones_like(ids) if mask is None else torch.as_tensor(mask).long()
    with torch.inference_mode():
        tokens = model.generate(
            input_ids=ids,
            attention_mask=there,
            do_sample=False,
            max_new_tokens=length,
        )
    # A decoder's output begins with the start token, a language model's with the prompt.
    return tokens[:, 1 if model.config.is_encoder_decoder else ids.shape[1] :].numpy()


ONE_BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a folder's `pytorch_model*.bin` files, whose pickles may hold nothing else.

    Raises:
        UserError: a file or tensor is missing, cannot be read or stored, or is no tensor.
    """
    files, expected = _bin_files(folder)
    tensors: dict[str, np.ndarray] = {}
    for path in files:
        for name, value in _unpickled(path).items():
            if is_no_weight(name):
                continue
            if name in tensors:
                raise UserError(f"{shown_path(path)} has {shown_name(name)}, as another file has")
            tensors[name] = _array(value, name, path)
    missing = {name for name in expected - tensors.keys() if not is_no_weight(name)}
    if missing:
        raise UserError(
            f"the index of {shown_path(folder)} names {shown_name(min(missing))}, which is in none "
            "of its files"
        )
    return tensors


def _bin_files(folder: Path) -> tuple[list[Path], set[str]]:
    """One file, else those of the index, as transformers chooses them; what the index names."""
    if (folder / ONE_BIN).exists():
        return [folder / ONE_BIN], set()
    if not (folder / BIN_INDEX).exists():  # then nobody knows whether some are missing
        raise UserError(
            f"neither {ONE_BIN} nor {BIN_INDEX} found in {shown_path(folder)}: give the folder of "
            "a model in that form"
        )
    index = read_object(folder / BIN_INDEX).texts("weight_map")
    if not all(map(is_file_name, index.values())):
        raise UserError(
            f"{shown_path(folder / BIN_INDEX)} is damaged: it names files of other folders"
        )
    return [folder / name for name in sorted(set(index.values()))], set(index)


def _unpickled(path: Path) -> dict[str, Any]:
    """Runs no code from the file: torch builds tensors and plain values only."""
    import torch

    check_regular(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise FileError(f"cannot read {shown_path(path)}: {error.strerror or error}") from error
    except Exception as error:  # torch raises many kinds for a damaged file
        raise FileError(
            f"cannot read {shown_path(path)}: it is damaged, no file of torch.save, or holds more "
            "than tensors"
        ) from error
    if not isinstance(state, dict) or not state or not all(isinstance(n, str) for n in state):
        raise FileError(f"{shown_path(path)} holds no tensors by name: give a model's state_dict")
    return state


def _array(value: Any, name: str, path: Path) -> np.ndarray:
    import ml_dtypes
    import torch

    where = f"{shown_name(name)} of {shown_path(path)}"
    if not isinstance(value, torch.Tensor):
        raise UserError(f"{where} is no tensor: give the file of a model alone")
    if value.layout != torch.strided:
        raise UserError(f"{where} is sparse, and cannot be converted")
    tensor = value.detach().contiguous()
    is_bfloat16 = tensor.dtype == torch.bfloat16
    try:
        array: np.ndarray = (tensor.view(torch.int16) if is_bfloat16 else tensor).numpy()
        return as_stored(name, array.view(ml_dtypes.bfloat16) if is_bfloat16 else array)
    except TypeError as error:  # such as float8 or complex numbers
        raise UserError(f"{where} is {tensor.dtype}, which cannot be converted") from error
    except ValueError as error:
        raise UserError(f"{shown_path(path)}: {error}") from error
