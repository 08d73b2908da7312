"""Models for Hugging Face: from a run that ends, or from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from config.sections import RunConfig
from data.pipeline import Pipeline
from huggingface.folders import PARAMS, TASK, TASK_FIELDS, check_is_free, write_hf_directory
from huggingface.hub import DataUnavailable
from huggingface.models import RANDOM
from modelling.memory import check_least
from modelling.spec import ModelFamily, family_of
from modelling.start import load_weights
from modelling.weights import Arrays
from terminal.screen import is_heard, say


def export(config: RunConfig, family: ModelFamily, weights: Arrays, folder: str | Path) -> None:
    """Write weights, configuration and tokenizer to a folder that transformers loads.

    Without a tokenizer, because the hub cannot be reached, the model is written all the same. Of
    several processes, the first one writes.

    Args:
        weights: whole weights by logical name; each is read once.

    Raises:
        CheckpointError: the folder is there and not empty, or cannot be written.
    """
    if not is_heard():  # values that devices of all processes hold are read by all of them
        for name in weights:
            weights[name]
        return
    data, complete = Pipeline(config, family.shape), None
    try:
        complete, config = data.tokenizer.base.save_pretrained, data.config
    except DataUnavailable as error:
        say(f"warning: no tokenizer is written: {error}")
    files = family.weights(config).for_files(weights)
    description = family.to_config_json(config) | {PARAMS: {TASK: task_fields(config)}}
    write_hf_directory(folder, files, description, complete=complete)
    say(f"wrote a model for Hugging Face to {folder}")


def task_fields(config: RunConfig) -> dict[str, str]:
    """What the model was trained to read and write: fields of the task's section."""
    values = {name: getattr(config.data, name, None) for name in TASK_FIELDS}
    return {name: value for name, value in values.items() if value is not None}


def export_checkpoint(config: RunConfig, folder: str) -> None:
    """Write what `checkpoint.load` names to a folder, random weights too; see `export`."""
    check_is_free(folder)
    check_least(config)
    family = family_of(config)
    table = family.weights(config)
    is_random = config.checkpoint.load == RANDOM
    weights = table.initial(config.model.seed) if is_random else load_weights(config, table).tensors
    export(config, family, weights, folder)
