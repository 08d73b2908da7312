"""Pretrained models on the Hugging Face hub or in local model folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from config.errors import UserError
from files.atomic_writing import unwrap_os_errors
from files.formatting import format_path
from files.json_files import JsonObject, read_json_object
from huggingface.hub import check_not_cache, is_reachable
from huggingface.hub_errors import explain_hub_error

CONFIG_PATTERNS = ("*.json",)
"""Patterns of a model's small files."""

ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class PretrainedInfo:
    """Configuration of a pretrained model, and whether its files have an LM head.

    Attributes:
        hf_config: its config.json, or that of its text part; of the tokens that end a text, all
            that generation_config.json names, and of a decoder's what it says.
        has_head: whether the head has a weight of its own; None: the weights are not here.
        multimodal_type: type of the multimodal model around it; None without one.
    """

    hf_config: JsonObject
    has_head: bool | None
    multimodal_type: str | None = None


def get_local_folder(name: str, files: Sequence[str] | None = None) -> Path:
    """Path of a model's folder: `name` itself, or the download from the hub.

    Args:
        files: patterns of those that are needed; None: descriptions and weights.

    Raises:
        UserError: there is none.
    """
    from huggingface.model_folders import CONFIG, is_hf_directory

    folder = Path(name) if Path(name).exists() else _download_model(name, files)
    if (folder / ADAPTER).exists() and not (folder / CONFIG).exists():
        raise CheckpointError(
            f"{format_path(name)} is an adapter, not a model: give --adapter.load with it, and "
            "--load with its model"
        )
    check_not_cache(folder)
    if not is_hf_directory(folder):
        raise CheckpointError(
            f"there is neither a checkpoint nor a Hugging Face model in {format_path(name)}: give "
            "a folder that --save wrote, or one with model.safetensors"
        )
    return folder


def read_pretrained(name: str) -> PretrainedInfo:
    """Read the configuration of a pretrained model, without downloading its weights.

    Raises:
        UserError: there is no such model, or no such file in its folder.
    """
    from huggingface.generation_config import (
        DECODER_TOKENS,
        GENERATION_CONFIG,
        read_eos_token_ids,
        read_generation_config,
    )
    from huggingface.model_folders import CONFIG, has_weights, read_hf_directory
    from huggingface.multimodal import HEAD_WEIGHTS, multimodal_type, text_model_config

    folder = get_local_folder(name, [CONFIG, GENERATION_CONFIG])
    model_config = read_json_object(folder / CONFIG)
    try:
        names = None if not has_weights(folder) else set(read_hf_directory(folder))
    except UserError:  # of damaged ones, which reading them will tell
        names = None
    hf_config = text_model_config(model_config, names)
    settings = read_generation_config(folder)
    eos_token_ids = read_eos_token_ids(settings)
    tokens: dict[str, Any] = {n: settings[n] for n in DECODER_TOKENS if n in settings}
    if eos_token_ids:
        tokens["eos_token_id"] = eos_token_ids if len(eos_token_ids) > 1 else eos_token_ids[0]
    if tokens:
        hf_config = hf_config.with_data({**hf_config.data, **tokens})
    has_head = None if names is None else not HEAD_WEIGHTS.isdisjoint(names)
    return PretrainedInfo(hf_config, has_head, multimodal_type(model_config.data))


def _download_model(name: str, files: Sequence[str] | None) -> Path:
    """Download the files of a model, with weights in one format only.

    Copies in other formats and in subfolders are skipped.
    """
    from huggingface.model_folders import WEIGHTS, list_weight_files

    if files is not None:
        return _download_files(name, files)
    folder = _download_files(name, [*CONFIG_PATTERNS, WEIGHTS])
    return (
        folder if (folder / WEIGHTS).exists() else _download_files(name, list_weight_files(folder))
    )


def _download_files(name: str, files: Sequence[str]) -> Path:
    """Download the top-level files of a model that match file name patterns."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    reachable = is_reachable()
    try:
        # An unreachable hub would be asked again and again for a minute.
        with unwrap_os_errors():
            return Path(
                snapshot_download(
                    name,
                    allow_patterns=list(files),
                    ignore_patterns=["*/*"],
                    local_files_only=not reachable,
                )
            )
    except HFValidationError as error:
        raise UserError(
            f"model {format_path(name)}: no such folder here, and no name of a model of the "
            "Hugging Face hub: check the path"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        problem = explain_hub_error(name, error, reachable)
        raise UserError(
            f"model {format_path(name)}: no such folder here, and the Hugging Face hub does not "
            f"give it ({problem.reason}): {problem.advice}"
        ) from error
