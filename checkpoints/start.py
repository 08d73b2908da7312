"""Where a run starts: random weights, a Hugging Face model, or a checkpoint of an earlier run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import (
    Checkpoint,
    CheckpointError,
    TensorFiles,
    has_checkpoint,
    is_hf_directory,
    load_checkpoint,
    read_hf_directory,
)
from config.errors import UserError
from config.sections import RunConfig
from data.hub import is_reachable
from modelling.weights import FP8, OPTIMIZER, Computed, WeightTable

Tensors = Mapping[str, np.ndarray]
RANDOM = "random"


@dataclass(frozen=True)
class Start:
    """The state a run starts from.

    Attributes:
        tensors: weights and, when a run is continued, optimizer state, by logical name.
        step: number of optimizer steps done.
        data: state of the data loader; None: from the beginning.
        source: where it comes from, for people.
        skipped_steps: how many of the steps left the state unchanged.
    """

    tensors: Tensors
    step: int = 0
    data: dict[str, Any] | None = None
    source: str = "random weights"
    skipped_steps: int = 0


def starting_point(config: RunConfig, table: WeightTable) -> Start:
    """The state that `checkpoint.load` names, or random weights if it names none or `RANDOM`.

    A checkpoint continues its run, at the step and the sample it was saved at; with
    `checkpoint.optim_state` false, a new run starts from its weights.

    Raises:
        UserError: nothing usable is there, or the weights do not fit the configured model.
    """
    load = config.checkpoint.load
    if load is None or load == RANDOM:
        return Start(table.initial(config.model.seed))
    if has_checkpoint(load):
        return _of_checkpoint(config, table, load)
    folder = load if Path(load).exists() else _downloaded(load)
    if not is_hf_directory(folder):
        raise CheckpointError(
            f"there is neither a checkpoint nor a Hugging Face model in {load}: give a folder that "
            "--save wrote, or one with model.safetensors"
        )
    tensors = read_hf_directory(folder)
    _check_fit(table, tensors, tensors, load)
    return Start(table.renamed(tensors), source=load)


def _of_checkpoint(config: RunConfig, table: WeightTable, load: str) -> Start:
    checkpoint = load_checkpoint(load)
    weights = _weights(checkpoint, table, load)
    has_state = len(weights) < len(checkpoint.tensors)
    if not config.checkpoint.optim_state:
        return Start(weights, source=f"the weights of step {checkpoint.step} in {load}")
    if not has_state and not config.model.eval:
        raise CheckpointError(
            f"the checkpoint in {load} has no optimizer state to continue with: give "
            "--optim_state false to start anew from its weights"
        )
    return Start(
        checkpoint.tensors,
        checkpoint.step,
        checkpoint.metadata.get("data"),
        f"step {checkpoint.step} in {load}",
        checkpoint.metadata.get("skipped_steps", 0),
    )


def load_weights(config: RunConfig, table: WeightTable) -> Start:
    """The weights of what `checkpoint.load` names, for generation, and FP8 state if it is needed.

    Raises:
        UserError: as for `starting_point`, or if it names nothing.
    """
    load = config.checkpoint.load
    if load is None or load == RANDOM:
        raise CheckpointError(
            "there are no weights: give --load DIR, a folder that run_finetuning.py --save wrote, "
            "or a Hugging Face model"
        )
    needs_scales = config.fp8.enabled and config.fp8.recipe == "delayed"
    if not has_checkpoint(load):
        if needs_scales:
            raise _no_scales(load)
        return starting_point(config, table)
    checkpoint = load_checkpoint(load)
    weights = _weights(checkpoint, table, load)
    if needs_scales:
        weights = _with_scales(weights, checkpoint.tensors, load)
    return Start(weights, checkpoint.step, None, f"step {checkpoint.step} in {load}")


def _with_scales(weights: Tensors, tensors: Tensors, load: str) -> Tensors:
    names = [n for n in tensors if n.startswith(f"{FP8}/")]
    if not names:
        raise _no_scales(load)
    return Computed({n: partial((weights if n in weights else tensors).__getitem__, n)
                     for n in (*weights, *names)})  # fmt: skip


def _no_scales(load: str) -> CheckpointError:
    return CheckpointError(
        f"{load} has no FP8 scales to generate with: train with --fp8.enabled, or give "
        "--fp8.recipe current, whose scales follow from the operands"
    )


def _weights(checkpoint: Checkpoint, table: WeightTable, load: str) -> Tensors:
    """The weights alone of a checkpoint, each read when it is asked for."""
    tensors = checkpoint.tensors
    names = [n for n in tensors if not n.startswith((f"{OPTIMIZER}/", f"{FP8}/"))]
    _check_fit(table, tensors, names, load)
    return Computed({n: partial(tensors.__getitem__, n) for n in names})


def _check_fit(table: WeightTable, files: TensorFiles, names: Iterable[str], load: str) -> None:
    """Raise CheckpointError unless the weights `names` of `files` are those of the model."""
    try:
        table.check_shapes({name: files.spec(name).shape for name in names})
    except ValueError as error:
        raise CheckpointError(f"{load}: {error}") from error


def _downloaded(name: str) -> str:
    """The local folder of a model on the Hugging Face hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # An unreachable hub would be asked again and again for a minute.
        return snapshot_download(
            name, allow_patterns=["*.safetensors", "*.json"], local_files_only=not is_reachable()
        )
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"weights {name}: no such folder here, and no such model can be had from the Hugging "
            "Face hub: check the path, connect to the network, or start from random weights with "
            f"--load {RANDOM}"
        ) from error
