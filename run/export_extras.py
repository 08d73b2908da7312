"""Files that an export copies from the base model: generation config and image processors."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.lazy_arrays import Arrays
from config.errors import UserError
from config.run import RANDOM
from config.sections import RunConfig
from files.formatting import format_path
from huggingface.generation_config import GENERATION_CONFIG, read_generation_config
from huggingface.model_folders import CONFIG, read_hf_config, read_hf_directory
from huggingface.multimodal import multimodal_config, text_tensor_name, with_text_tensors
from huggingface.pretrained import get_local_folder
from terminal.screen import say

PROCESSORS = "*processor_config.json"
"""Glob of image processor configs."""


def base_generation_config(config: RunConfig) -> Mapping[str, Any]:
    """Return the content of the base model's generation_config.json; {} if there is none.

    It is searched beside the loaded weights, then beside the tokenizer, which a run keeps a copy
    of.
    """
    for name in (config.checkpoint.load, config.data.tokenizer):
        if name is not None and name != RANDOM:
            folder = (
                Path(name)
                if Path(name).is_dir()
                else _find_local_model(name, [CONFIG, GENERATION_CONFIG])
            )
            settings = read_generation_config(folder) if folder else {}
            if settings:
                return settings
    return {}


def merge_multimodal_parts(
    config: RunConfig, files: Arrays, hf_config: dict[str, Any]
) -> tuple[Arrays, dict[str, Any], Path | None]:
    """Merge the weights of a text model into the multimodal model that contains it.

    Returns:
        Weights and config.json of the merged model, and the multimodal model's folder; without a
        multimodal model the inputs, and None.

    Raises:
        CheckpointError: the multimodal model has another text model.
    """
    name: str | None = getattr(config.model, "multimodal_parent", None)
    folder = None if name is None else _find_local_model(name)
    if name is None:
        return files, hf_config, None
    if folder is None:
        say(f"warning: {format_path(name)} is not found: exporting the text model alone")
        return files, hf_config, None
    base = read_hf_directory(folder)
    if sum(text_tensor_name(name) in files for name in base) != len(files):
        raise CheckpointError(
            f"{format_path(name)}, which model.multimodal_parent names, has another text part than "
            "was trained: give the folder that training began with"
        )
    merged = with_text_tensors(base, files)
    say(f"the {len(merged) - len(files)} weights besides the text part are {format_path(name)}'s")
    merged_config = multimodal_config(read_hf_config(folder) or {}, hf_config)
    if config.model.new_rows is not None:
        rows = {"vocab_size": config.model.vocab_size}
        merged_config["text_config"] = {**merged_config.get("text_config", {}), **rows}
    return merged, merged_config, folder


def copy_processor_configs(folder: Path, target_folder: Path) -> None:
    """Copy the image processor configs of a multimodal model."""
    for path in folder.glob(PROCESSORS):
        shutil.copy(path, target_folder)


def _find_local_model(name: str, files: list[str] | None = None) -> Path | None:
    """Return the local folder of a model; None if it cannot be found or downloaded."""
    try:
        return get_local_folder(name, files)
    except UserError:
        return None
