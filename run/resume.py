"""Resolution of the state a run starts from: a checkpoint, a model or random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import popdist
from checkpoints import CheckpointError
from config.base import flatten_by_path
from config.process_checks import check_same_on_all_processes
from config.run import RANDOM
from config.sections import RunConfig
from files.formatting import format_name, format_path
from files.json_files import JsonObject
from modelling.weights import OPTIMIZER_PREFIX, WeightMap
from run.base_model_ref import BaseModelRef, metadata_of, weight_names
from run.initial_state import InitialState, with_reload_function
from run.model_weights import check_checkpoint, load_missing_base_weights
from run.weight_checks import check_digests, check_finite
from run.weight_loading import has_steps, open_checkpoint, state_from_weights
from terminal.screen import is_first_process

if TYPE_CHECKING:
    from checkpoints import SavedCheckpoint

_COMPARED_BY_DIGEST = ("data.train", "data.validation", "data.tokenizer", "data.chat_template")
"""Fields in which different values can name the same data."""


def resolve_initial_state(
    config: RunConfig, weight_map: WeightMap, fresh: bool = False
) -> InitialState:
    """Resolve the state that a training run starts from: a checkpoint, a model, or random.

    A run in `checkpoint.save` is resumed, by the same command any number of times. Otherwise the
    state is that of `checkpoint.load`, or random weights for None and "random". A checkpoint there
    resumes its run, at the step and sample of the save; with `checkpoint.load_optimizer` false, a
    new run starts from its weights.

    Args:
        fresh: ignore the run in `checkpoint.save`.

    Raises:
        UserError: no usable state exists, its weights do not fit the configured model, or the run
            in `checkpoint.save` has another model or other data.
    """

    def find_state() -> InitialState:
        start = _resolve_once(config, weight_map, fresh)
        known_digests = {} if start.base is None else start.base.sha256  # verified on read
        tensors = check_digests(
            start.tensors, start.source, {*weight_map.frozen_names} - known_digests.keys()
        )
        start = replace(start, tensors=tensors, digest_checked=tensors)
        if config.model.quant is None:
            return start
        from run.quantized_cache import with_quantized_cache

        cached = with_quantized_cache(config, tensors, known_digests or tensors.sha256)
        return replace(start, tensors=cached)

    return with_reload_function(find_state)


def _resolve_once(config: RunConfig, weight_map: WeightMap, fresh: bool) -> InitialState:
    load, save = config.checkpoint.load, config.checkpoint.save
    check_same_on_all_processes(
        {f"steps in {n}": has_steps(at) for n, at in {"--save": save, "--load": load}.items()}
    )
    if save is not None and not fresh and has_steps(save):
        from checkpoints import load_checkpoint

        checkpoint = load_checkpoint(save, verify=False)
        saved = flatten_by_path(_read_optional_object(metadata_of(checkpoint), "config") or {})
        if not _is_within(load, save) or saved.get("checkpoint.load") == load:
            _check_same_run(saved, config, save)
            model = None if load == RANDOM or has_steps(load) else load
            return _resume_from_checkpoint(
                config, checkpoint, weight_map, save, "--overwrite starts over", model
            )
    if load is not None and config.checkpoint.load_optimizer and has_steps(load):
        checkpoint = open_checkpoint(config, weight_map, load)
        other = ", with another --save" if save is not None and _is_within(load, save) else ""
        restart_hint = f"--checkpoint.load_optimizer false{other} starts a new run from its weights"
        return _resume_from_checkpoint(config, checkpoint, weight_map, load, restart_hint)
    start = state_from_weights(config, weight_map, load or RANDOM)
    text = f"the weights of {start.source}" if start.checkpoint is not None else start.source
    return replace(start, source=text)


def _resume_from_checkpoint(
    config: RunConfig,
    checkpoint: SavedCheckpoint,
    weight_map: WeightMap,
    folder: str,
    restart_hint: str,
    model: str | None = None,
) -> InitialState:
    """Return the initial state of a run that resumes from a checkpoint.

    Args:
        restart_hint: advice on how to start a new run instead.
        model: location of the base model, if it is given.
    """
    from modelling.weights.optimizer_state import convert_optimizer_state, optimizer_state_specs

    check_checkpoint(config, weight_map, checkpoint, folder)
    if not any(name.startswith(f"{OPTIMIZER_PREFIX}/") for name in checkpoint.tensors):
        raise CheckpointError(
            f"the checkpoint in {folder} has no optimizer state to resume from: {restart_hint}"
        )
    if set(weight_names(checkpoint)) != {weight.name for weight in weight_map.trainable_weights}:
        raise CheckpointError(
            f"the run in {format_path(folder)} trains other weights than training.trainable and "
            f"frozen select: resume it with its own settings; {restart_hint}"
        )
    tensors = check_finite(config, checkpoint.tensors, folder)
    state_specs = optimizer_state_specs(config, weight_map)
    specs = {n: checkpoint.tensors.spec(n) for n in tensors}
    state = convert_optimizer_state(tensors, specs, state_specs, config)
    if isinstance(state, str):
        raise CheckpointError(
            f"the checkpoint in {format_path(folder)} has no {state} of shape "
            f"{state_specs[state].shape}, which {config.training.optimizer.name} as configured "
            f"needs: resume with that run's optimizer; {restart_hint}"
        )
    state_note = ", its optimizer state in another form from now on" if state is not tensors else ""
    metadata = metadata_of(checkpoint)
    return InitialState(
        load_missing_base_weights(config, state, checkpoint, weight_map, folder, model),
        step=checkpoint.step,
        data=_read_optional_object(metadata, "data"),
        source=f"step {checkpoint.step} in {folder}{state_note}",
        skipped_steps=metadata.get_count("skipped_steps") if "skipped_steps" in metadata else 0,
        best=_read_optional_object(metadata, "best"),
        sha256=checkpoint.sha256,
        checkpoint=checkpoint,
        base=BaseModelRef.from_checkpoint(checkpoint),
        restart_hint=restart_hint,
    )


def _read_optional_object(metadata: JsonObject, name: str) -> dict[str, Any] | None:
    """Return a JSON object in a checkpoint's metadata; None if it is missing."""
    return None if metadata.data.get(name) is None else metadata.get_dict(name)


def _is_within(load: str | None, save: str) -> bool:
    """True if the path `load` is the run folder `save`, or the folder of a step in it."""
    return load is not None and Path(load).resolve().is_relative_to(Path(save).resolve())


def base_model_metadata(initial_state: InitialState, weight_map: WeightMap) -> dict[str, Any]:
    """Return checkpoint metadata on the base model's weights, on process 0; collective.

    Called when the weights have been read.

    Raises:
        CheckpointError: a process has read other weights than process 0.
    """
    if not weight_map.frozen_names:
        return {}
    base, tensors = initial_state.base, initial_state.digest_checked
    assert base is not None, "who starts to train knows where its weights are"
    assert tensors is not None, "see `resolve_initial_state`"
    if base.sha256:
        return base.to_metadata({name: base.sha256[name] for name in weight_map.frozen_names})
    local_digests = tensors.digests(weight_map.frozen_names) if is_first_process() else None
    first: Mapping[str, str] = popdist.all_gather_object(local_digests)[0]
    for name, sha256 in tensors.sha256.items():
        if first.get(name, sha256) != sha256:
            raise tensors.digest_error(name)
    return base.to_metadata(first) if is_first_process() else {}


def _check_same_run(saved: Mapping[str, Any], config: RunConfig, folder: str) -> None:
    """Raise CheckpointError if the run folder holds a run of a different model or of other data.

    Args:
        saved: that run's config by dotted path, as far as it is known.
    """
    current = flatten_by_path(config.to_dict())
    for name in sorted(saved.keys() & current.keys()):
        if name in _COMPARED_BY_DIGEST or not name.startswith(("model.", "data.")):
            continue
        if saved[name] != current[name]:
            raise CheckpointError(
                f"{format_path(folder)} has a run with {name} {format_name(saved[name], 35)}, but "
                f"this one has {format_name(current[name], 35)}: resume that run with its "
                "settings, give another --save, or --overwrite to delete it and start over"
            )
