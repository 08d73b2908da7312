"""Reads model weights: of Hugging Face models, of checkpoints with their base model, or random.

`read_weights` does all of it: tensors of files, the configured vocabulary, checks on read
(`run.weight_checks`) and adapters on top. Each tensor is read on access.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from checkpoints import CheckpointError
from checkpoints.lazy_arrays import Arrays, ArraysView, LazyArrays, OverlayArrays
from config.base import flatten_by_path
from config.errors import UserError
from config.run import RANDOM
from config.sections import RunConfig
from files.formatting import format_name, format_path
from files.json_files import JsonObject
from modelling.model_family import get_family
from modelling.weights import WeightMap
from modelling.weights.weight_mapping import is_adapter, is_trainable
from run.base_model_ref import BaseModelRef, weight_names
from run.weight_checks import (
    HEAD,
    DigestCheckedTensors,
    check_config_match,
    check_finite,
    check_lm_head_exists,
    check_weights_match,
)
from terminal.screen import say

if TYPE_CHECKING:
    from checkpoints import SavedCheckpoint
    from huggingface.model_folders import ModelFiles

MODEL = "model"
"""Metadata key of the model's config.json in a checkpoint."""


def read_weights(
    config: RunConfig,
    weight_map: WeightMap,
    location: str,
    checkpoint: SavedCheckpoint | None = None,
    needs_base: bool = True,
) -> tuple[Arrays, str]:
    """Return a model's weights by name, read on access, and the files' fingerprint if known.

    Args:
        weight_map: the model's weights; its adapters are read from the location or `adapter.load`,
            or newly initialized.
        location: "random", a checkpoint, or a Hugging Face model (folder or name).
        checkpoint: the checkpoint at the location, if it is already loaded.
        needs_base: see `load_missing_base_weights`.

    Raises:
        UserError: the weights are missing, or do not fit the config.
    """
    if checkpoint is None and location != RANDOM:
        from checkpoints import has_checkpoint, load_checkpoint

        if has_checkpoint(location):
            checkpoint = load_checkpoint(location, verify=False)
    if checkpoint is not None:
        return _checkpoint_weights(config, weight_map, location, checkpoint, needs_base)
    if location == RANDOM:
        weights, sha256 = weight_map.without_adapters.init_weights(config.model.seed), ""
    else:
        weights, sha256 = _hf_weights(config, weight_map.without_adapters, location)
    return _with_adapters(config, weight_map, weights), sha256


# ---- checkpoints --------------------------------------------------------------------------------
def _checkpoint_weights(
    config: RunConfig,
    weight_map: WeightMap,
    location: str,
    checkpoint: SavedCheckpoint,
    needs_base: bool,
) -> tuple[Arrays, str]:
    """Return a checkpoint's weights, and its digest; what it lacks is of its base model or new."""
    from run.classifier_weights import missing_head_weights, tensors_for_head

    names = weight_names(checkpoint)
    tensors = tensors_for_head(config, ArraysView(checkpoint.tensors, names), location)
    base = BaseModelRef.from_checkpoint(checkpoint)
    frozen = set[str]() if base is None else {*base.sha256}
    lacks_head = any(w.name not in frozen for w in missing_head_weights(weight_map, tensors))
    if lacks_head or len(tensors) < len(names):
        check_config_match(config, checkpoint.metadata.get(MODEL), location)
        if base is not None:
            raise CheckpointError(
                f"the run in {format_path(location)} holds only what it trained: a model with "
                "another head starts from one folder, which run_export.py --merge writes"
            )
        weights = _with_initialized_head(config, weight_map.without_adapters, tensors, location)
        return _with_adapters(config, weight_map, weights), checkpoint.sha256
    check_checkpoint(config, weight_map, checkpoint, location)
    has_own = has_adapters(weight_map, checkpoint)
    expected = check_finite(config, checkpoint.tensors, location, weight_names(checkpoint))
    weights = load_missing_base_weights(
        config, expected, checkpoint, weight_map, location, needs_base=needs_base
    )
    return weights if has_own else _with_adapters(config, weight_map, weights), checkpoint.sha256


def _with_initialized_head(
    config: RunConfig, weight_map: WeightMap, tensors: LazyArrays, location: str
) -> Arrays:
    """Return a checkpoint's weights of a model with another head, and a new head."""
    from run.classifier_weights import (
        missing_head_weights,
        with_initialized_head,
        without_head_weights,
    )

    new_head = missing_head_weights(weight_map, tensors)
    check_weights_match(without_head_weights(weight_map, new_head), tensors, tensors, location)
    return with_initialized_head(config, new_head, check_finite(config, tensors, location))


def has_adapters(weight_map: WeightMap, checkpoint: SavedCheckpoint) -> bool:
    """True if a checkpoint contains the model's adapters; False if it is their base model."""
    return any(w.name in checkpoint.tensors for w in weight_map.filter_mappings(is_adapter).weights)


def check_checkpoint(
    config: RunConfig, weight_map: WeightMap, checkpoint: SavedCheckpoint, load: str
) -> None:
    """Raise CheckpointError unless a checkpoint and its base model have all the model's weights."""
    check_config_match(config, checkpoint.metadata.get(MODEL), load)
    base = BaseModelRef.from_checkpoint(checkpoint)
    expected = weight_map if has_adapters(weight_map, checkpoint) else weight_map.without_adapters
    frozen = {} if base is None else base.sha256
    check_weights_match(expected, checkpoint.tensors, weight_names(checkpoint), load, frozen)


def load_missing_base_weights(
    config: RunConfig,
    expected: Arrays,
    checkpoint: SavedCheckpoint,
    weight_map: WeightMap,
    load: str,
    model: str | None = None,
    needs_base: bool = True,
) -> Arrays:
    """Return a checkpoint's tensors; weights that it lacks are read from its base model.

    Args:
        model: location of the base model, if it is given.
        needs_base: True raises CheckpointError now if the base cannot be read; False raises it
            when one of its weights is accessed.
    """
    base = BaseModelRef.from_checkpoint(checkpoint)
    if base is None:
        return expected
    place = config.checkpoint.base_model or base.find_checkpoint(checkpoint.path, model)
    try:
        weights, _ = read_weights(config, weight_map.without_adapters, place)
    except UserError as error:
        failure = CheckpointError(
            f"the run in {format_path(load)} holds what it trained, and {format_path(place)} the "
            f"other weights, which cannot be loaded: {error}; --checkpoint.base_model says where "
            "they are"
        )
        if needs_base:
            raise failure from error
        return OverlayArrays(
            expected, LazyArrays({name: partial(_raise_error, failure) for name in base.sha256})
        )

    def make_error(name: str) -> CheckpointError:
        return CheckpointError(
            f"{format_path(place)} is not the model that the run in {format_path(load)} began "
            f"with: {name} is another; --checkpoint.base_model names the folder of that model"
        )

    return OverlayArrays(
        expected,
        DigestCheckedTensors(
            ArraysView(weights, base.sha256), base.sha256, make_error, base.sha256
        ),
    )


def _raise_error(error: CheckpointError) -> np.ndarray:
    raise error


# ---- models of Hugging Face ---------------------------------------------------------------------
def _hf_weights(config: RunConfig, weight_map: WeightMap, model_name: str) -> tuple[Arrays, str]:
    """Read a Hugging Face model's weights at the configured vocabulary size; and a fingerprint."""
    from huggingface.model_folders import read_hf_config, read_hf_directory
    from huggingface.multimodal import (
        multimodal_type,
        prefix_without_lm_head,
        text_model_config,
        text_tensors,
    )
    from huggingface.pretrained import get_local_folder
    from run.classifier_weights import (
        missing_head_weights,
        tensors_for_head,
        with_initialized_head,
        without_head_weights,
    )

    folder = get_local_folder(model_name)
    hf_config, files = read_hf_config(folder), read_hf_directory(folder)
    tensors: LazyArrays = files
    if hf_config is not None and (architecture := multimodal_type(hf_config)) is not None:
        tensors = text_tensors(files)
        hf_config = text_model_config(JsonObject(hf_config, model_name), tensors).data
        say(
            f"{format_path(model_name)} is a {architecture}: its text part is read, the other "
            f"{len(files) - len(tensors)} weights stay as they are"
        )
    elif prefix := prefix_without_lm_head(hf_config or {}, files):
        tensors = ArraysView(files, renamed={f"{prefix}{weight}": weight for weight in files})
    tensors = tensors_for_head(config, tensors, model_name)
    loaded = _with_loaded_vocab_size(config, hf_config, tensors, model_name)
    complete = get_family(loaded).base_weight_map(loaded)
    expected = without_head_weights(complete, missing_head_weights(complete, tensors))
    check_config_match(loaded, hf_config, model_name)
    check_lm_head_exists(loaded, expected, tensors, model_name)
    try:
        check_weights_match(expected, tensors, tensors, model_name)
    except CheckpointError as error:
        raise _missing_weight_error(files, model_name) or error from error
    weights = _resize_vocabulary(
        config, weight_map, expected, check_finite(config, expected.from_hf(tensors), model_name)
    )
    return with_initialized_head(
        config, missing_head_weights(complete, tensors), weights
    ), files.fingerprint()


def _missing_weight_error(files: ModelFiles, model_name: str) -> CheckpointError | None:
    """Return the error if a weight that a model's index names is in no file; None if complete."""
    for weight, file in files.missing.items():
        return CheckpointError(
            f"the index of {format_path(model_name)} names {format_name(weight)} in "
            f"{format_name(file)}, which does not have it: download that file again"
        )
    return None


def _with_adapters(config: RunConfig, weight_map: WeightMap, weights: Arrays) -> Arrays:
    """Add adapter weights, from `adapter.load` or newly initialized, to a base model's weights."""
    expected, folder = weight_map.filter_mappings(is_adapter), config.adapter.load
    if not expected.weights:
        return weights
    if folder is None:
        from modelling.weights.lora import init_adapters

        return OverlayArrays(init_adapters(weight_map, weights, config.model.seed), weights)
    from huggingface.peft_files import adapter_tensors

    alone = config.with_values({"training.trainable": None, "training.frozen": None})
    expected = get_family(config).weight_map(alone).filter_mappings(is_trainable)
    files = adapter_tensors(folder)
    check_weights_match(expected, files, files, folder)
    return OverlayArrays(check_finite(config, expected.from_hf(files), folder), weights)


# ---- vocabulary ---------------------------------------------------------------------------------
def _with_loaded_vocab_size(
    config: RunConfig, hf_config: Mapping[str, Any] | None, tensors: LazyArrays, model_name: str
) -> RunConfig:
    """Return the config with the vocabulary size of the loaded model.

    It can have fewer rows, or a tied head.

    Args:
        hf_config: content of the model's config.json.
        tensors: the model's weights.
        model_name: for messages.
    """
    family, model = get_family(config), config.model
    names = [n for n in family.base_weight_map(config).embedding_names if n in tensors]
    rows = tensors.spec(names[0]).shape[0] if names else model.vocab_size
    values: dict[str, Any] = {}
    if set(range(rows, model.vocab_size)) <= {*model.embedding_rows_to_initialize()}:
        rows = min(rows, model.vocab_size)
        values = {model.field_path("vocab_size"): rows, model.field_path("new_rows"): None}
        for token in ("eos_token_id", "pad_token_id"):
            values[f"model.{token}"] = min(getattr(model, token), rows - 1)
    can_untie = not family.infers_tied_head and HEAD not in tensors and hf_config is not None
    if can_untie and model.tie_word_embeddings is False:
        of_model = family.from_config_json(JsonObject(dict(hf_config or {}), model_name))
        tied = model.field_path("tie_word_embeddings")
        values[tied] = flatten_by_path({"model": of_model}).get(tied, False)
    return config.with_values(values)


def _resize_vocabulary(
    config: RunConfig, weight_map: WeightMap, loaded: WeightMap, weights: Arrays
) -> Arrays:
    """Resize the vocabulary rows of loaded weights to the configured size.

    New rows are the mean of the others; an untied head starts as a copy of the embedding.

    Args:
        loaded: weight map of the model that the weights are from.
    """
    (embedding, *_), expected = loaded.embedding_names, {w.name for w in loaded.weights}
    rows, new = config.model.vocab_size, config.model.embedding_rows_to_initialize()
    load_fns = {}
    for name in weight_map.vocabulary_names:
        source = name if name in expected else embedding
        if new:
            load_fns[name] = partial(_resize_rows, weights, source, rows, new)
        elif source != name:
            load_fns[name] = partial(weights.__getitem__, source)
    return OverlayArrays(LazyArrays(load_fns), weights)


def _resize_rows(weights: Arrays, name: str, rows: int, new_rows: Sequence[int]) -> np.ndarray:
    """Resize a weight to `rows` rows; new rows are the mean of the loaded rows."""
    old, is_row = weights[name], False
    if old.shape[0] == 1:  # a logits bias of shape (1, vocab_size)
        old, is_row = old.T, True
    is_old = np.ones(len(old), bool)
    is_old[[row for row in new_rows if row < len(old)]] = False
    resized = np.empty((rows, *old.shape[1:]), old.dtype)
    resized[: len(old)] = old
    resized[list(new_rows)] = old[is_old].mean(axis=0, dtype=np.float64).astype(old.dtype)
    return resized.T if is_row else resized
