"""Models of the Hugging Face hub, or in folders of the same form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from checkpoints.errors import CheckpointError
from config.errors import UserError
from files.json_files import Fields, read_object
from files.shown import shown_path
from huggingface.folders import CONFIG, is_hf_directory
from huggingface.hub import is_reachable

WEIGHTS = ("*.safetensors", "*.json")
ADAPTER = "adapter_config.json"
RANDOM = "random"  # in place of a model: random weights


def local_model(name: str, files: Sequence[str] = WEIGHTS) -> Path:
    """The folder of a model: `name` itself, or where the hub's model was downloaded to.

    Args:
        files: patterns of those that are needed.

    Raises:
        UserError: there is none.
    """
    folder = Path(name) if Path(name).exists() else _downloaded(name, files)
    if (folder / ADAPTER).exists() and not (folder / CONFIG).exists():
        raise CheckpointError(
            f"{shown_path(name)} is an adapter, not a model: merge it into its base model first, "
            "as peft's merge_and_unload does"
        )
    if not is_hf_directory(folder):
        raise CheckpointError(
            f"there is neither a checkpoint nor a Hugging Face model in {shown_path(name)}: give a "
            "folder that --save wrote, or one with model.safetensors"
        )
    return folder


def model_description(name: str) -> Fields:
    """The content of a model's config.json.

    Raises:
        UserError: there is no such model, or no such file in its folder.
    """
    return read_object(local_model(name, [CONFIG]) / CONFIG)


def _downloaded(name: str, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # An unreachable hub would be asked again and again for a minute.
        snapshot = snapshot_download(
            name, allow_patterns=list(files), local_files_only=not is_reachable()
        )
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"model {shown_path(name)}: no such folder here, and no such model can be had from the "
            "Hugging Face hub: check the path, or connect to the network"
        ) from error
    return Path(snapshot)
