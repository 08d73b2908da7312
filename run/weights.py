"""The weights of a model: those in a folder of Hugging Face's, in a checkpoint, or in both."""

from __future__ import annotations

from checkpoints import Checkpoint, CheckpointError, has_checkpoint, load_checkpoint
from checkpoints.arrays import Arrays, LazyArrays, Overlay
from config.errors import UserError
from config.sections import RunConfig
from files.json_files import Fields
from files.shown import shown_name, shown_path
from huggingface.folders import ModelFiles, hf_description, read_hf_directory
from huggingface.models import RANDOM, local_model
from huggingface.peft_files import adapter_tensors
from huggingface.wrappers import text_part, text_tensors, wrapper_of
from modelling.spec import family_of
from modelling.weights import FP8, OPTIMIZER, WeightTable
from modelling.weights.lora import init_adapters
from modelling.weights.row import is_of_adapter, is_trained
from run.checks import check_fit, check_head, check_model, finite
from run.frozen_base import Base, unavailable, verified
from run.vocabulary import as_loaded, with_vocabulary
from terminal.screen import say

MODEL = "model"
"""Name under which a checkpoint's metadata have Hugging Face's description of its model."""


def whole_weights(
    config: RunConfig,
    checkpoint: Checkpoint,
    table: WeightTable,
    load: str,
    needs_base: bool = True,
) -> Arrays:
    """All weights of a checkpoint's model, each read when it is asked for.

    Args:
        needs_base: see `with_base`.

    Raises:
        CheckpointError: they do not fit the configuration, or those that the checkpoint does not
            hold cannot be had.
    """
    tensors, names = checkpoint.tensors, weight_names(checkpoint)
    if table.only(is_of_adapter).weights and not has_adapters(table, checkpoint):
        return adapted(config, table, whole_weights(config, checkpoint, table.base, load))
    check_model(config, checkpoint.metadata.get(MODEL), load)
    base = Base.saved(metadata_of(checkpoint))
    frozen = {} if base is None else base.sha256 or {}
    check_fit(table, tensors, names, load, frozen)
    own = finite(config, tensors, load, names)
    return with_base(config, own, checkpoint, table, load, needs_base=needs_base)


def model_weights(config: RunConfig, table: WeightTable, name: str) -> tuple[Arrays, str]:
    """The weights of a Hugging Face model, and its fingerprint."""
    folder = local_model(name)
    description, files = hf_description(folder), read_hf_directory(folder)
    tensors: LazyArrays = files
    if description is not None and (kind := wrapper_of(description)) is not None:
        tensors = text_tensors(files)
        description = text_part(Fields(description, name), tensors).data
        say(
            f"{shown_path(name)} is a {kind}: its text part is read, the other "
            f"{len(files) - len(tensors)} weights stay as they are"
        )
    loaded = as_loaded(config, description, tensors, name)
    own = family_of(loaded).table(loaded)
    check_model(loaded, description, name)
    check_head(loaded, own, tensors, name)
    try:
        check_fit(own, tensors, tensors, name)
    except CheckpointError as error:
        raise _of_absent(files, name) or error from error
    weights = with_vocabulary(config, table.base, own, finite(config, own.renamed(tensors), name))
    return adapted(config, table, weights), files.fingerprint()


def _of_absent(files: ModelFiles, name: str) -> CheckpointError | None:
    """The error for weights that the index of the files names and no file has, if there are any."""
    for weight, file in files.absent.items():
        return CheckpointError(
            f"the index of {shown_path(name)} names {shown_name(weight)} in {shown_name(file)}, "
            "which does not have it: download that file again"
        )
    return None


def adapted(config: RunConfig, table: WeightTable, weights: Arrays) -> Arrays:
    """The weights of a base model with those of the table's adapters: `adapter.load` has them, or
    they begin."""
    own, folder = table.only(is_of_adapter), config.adapter.load
    if not own.weights:
        return weights
    if folder is None:
        return Overlay(init_adapters(table, weights, config.model.seed), weights)
    alone = config.changed({"training.trained": None, "training.frozen": None})
    own, files = family_of(config).weights(alone).only(is_trained), adapter_tensors(folder)
    check_fit(own, files, files, folder)
    return Overlay(finite(config, own.renamed(files), folder), weights)


def with_base(
    config: RunConfig,
    own: Arrays,
    checkpoint: Checkpoint,
    table: WeightTable,
    load: str,
    model: str | None = None,
    needs_base: bool = True,
) -> Arrays:
    """What a checkpoint holds, with the weights that it does not.

    Args:
        model: where the base is said to be.
        needs_base: raise CheckpointError at once if the base cannot be read, and not only when one
            of its weights is asked for.
    """
    base = Base.saved(metadata_of(checkpoint))
    if base is None:
        return own
    place = config.checkpoint.base or base.place(checkpoint.path, model)
    try:
        weights = weights_at(config, table.base, place)
    except UserError as error:
        failure = CheckpointError(
            f"the run in {shown_path(load)} holds what it trained, and {shown_path(place)} the "
            f"other weights, which cannot be had: {error}; --checkpoint.base says where they are"
        )
        if needs_base:
            raise failure from error
        return Overlay(own, unavailable(base.sha256 or {}, failure))
    return Overlay(own, verified(base, weights, (load, place)))


def weights_at(config: RunConfig, table: WeightTable, place: str) -> Arrays:
    """Read the weights of a model's folder or name, of a checkpoint, or the initial random ones.

    Raises:
        UserError: they are not there, or do not fit the configuration.
    """
    if place == RANDOM:
        return table.initial(config.model.seed)
    if has_checkpoint(place):
        return whole_weights(config, load_checkpoint(place, verify=False), table, place)
    return model_weights(config, table, place)[0]


def has_adapters(table: WeightTable, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has some of the table's adapters; else it has what they are for."""
    return any(w.name in checkpoint.tensors for w in table.only(is_of_adapter).weights)


def weight_names(checkpoint: Checkpoint) -> list[str]:
    return [n for n in checkpoint.tensors if not n.startswith((f"{OPTIMIZER}/", f"{FP8}/"))]


def metadata_of(checkpoint: Checkpoint) -> Fields:
    return Fields(checkpoint.metadata, f"the manifest of {shown_path(checkpoint.path)}")
