"""Model folders as `save_pretrained` and `from_pretrained` of transformers have them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from training.checkpoint.errors import CheckpointError
from training.checkpoint.shards import shards_of, sync, write_json, write_shard
from training.checkpoint.tensor_files import TensorFiles

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
OTHER_FORMATS = ("pytorch_model*.bin", "tf_model.h5", "flax_model.msgpack")


def is_hf_directory(path: str | Path) -> bool:
    """Whether it is a folder with a model's config.json or weights in any format."""
    path = Path(path)
    patterns = (CONFIG, "*.safetensors", *OTHER_FORMATS)
    return any(next(path.glob(pattern), None) for pattern in patterns)


def read_hf_directory(path: str | Path) -> TensorFiles:
    """The weights of a model by their Hugging Face names; each access reads one from disk.

    Weights that the model ties, such as `encoder.embed_tokens.weight` of T5, may be absent: the
    folder holds one of the names only.

    Raises:
        CheckpointError: if there is no folder, or no complete set of safetensors files in it.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(
            f"no model in {path}: give a Hugging Face model folder with {CONFIG} and {WEIGHTS}"
        )
    return TensorFiles(_weight_files(path))


def write_hf_directory(
    path: str | Path,
    tensors: Mapping[str, np.ndarray],
    config_json: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model folder that `from_pretrained` of transformers loads.

    Other files in the folder, such as a tokenizer's, stay. Whoever reads meanwhile finds the
    model that was there before, or none, or the new one; never parts of both.

    Args:
        path: the folder; it is created if need be.
        tensors: arrays by Hugging Face name. Each is taken when its turn comes to be written.
        config_json: content of config.json.
        shard_bytes: size above which the weights are split into several files.

    Raises:
        CheckpointError: if the folder cannot be written.
        TypeError: for a dtype that cannot be stored.
    """
    path = Path(path)
    draft = path / ".draft"
    try:
        path.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
        draft.mkdir()
        write_json(draft / CONFIG, config_json)
        _write_weights(draft, tensors, shard_bytes)
        _move_model(draft, path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write the model folder {path}: {reason}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files that make up the model, chosen as transformers chooses them.

    Others are not looked for: without an index nobody knows whether some are missing.
    """
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    if (path / INDEX).is_file():
        try:
            index = json.loads((path / INDEX).read_text(encoding="utf-8"))
            return [path / Path(file).name for file in sorted(set(index["weight_map"].values()))]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{path / INDEX} is damaged: {error}") from error
    others = sorted(file.name for pattern in OTHER_FORMATS for file in path.glob(pattern))
    if others:
        raise CheckpointError(
            f"only {others[0]} found in {path}: convert it to safetensors, by loading it with "
            "transformers and calling save_pretrained"
        )
    raise CheckpointError(f"neither {WEIGHTS} nor {INDEX} found in {path}")


def _write_weights(folder: Path, tensors: Mapping[str, np.ndarray], shard_bytes: int) -> None:
    shards: list[list[str]] = []
    total = 0
    for shard in shards_of(tensors, shard_bytes):
        write_shard(folder / str(len(shards)), shard)
        shards.append(list(shard))
        total += sum(array.nbytes for array in shard.values())
    # How many there are, which their names tell, is known only now.
    if len(shards) == 1:
        os.rename(folder / "0", folder / WEIGHTS)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(folder / str(number), folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _move_model(draft: Path, path: Path) -> None:
    """Replace the model in `path` with the finished one in `draft`.

    What a reader starts from goes first and comes last. The draft is whole all the while.
    """
    for old in [path / INDEX, *path.glob("model*.safetensors")]:
        old.unlink(missing_ok=True)
    sync(path)
    last = (WEIGHTS, INDEX)
    for file in sorted(draft.iterdir(), key=lambda file: file.name in last):
        os.replace(file, path / file.name)
    sync(path)
