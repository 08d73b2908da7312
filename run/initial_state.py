"""Initial state of a run: random weights, a Hugging Face model, or a checkpoint to resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import popdist
from checkpoints import (
    CheckpointError,
    DamagedError,
    SavedCheckpoint,
    has_checkpoint,
    load_checkpoint,
)
from checkpoints.lazy_arrays import Arrays, OverlayArrays
from config.base import flattened
from config.process_checks import check_same_on_all_processes
from config.sections import RunConfig
from files.formatting import format_name, format_path
from files.json_files import JsonObject
from huggingface.pretrained import RANDOM
from modelling.model_family import get_family
from modelling.weights import FP8_PREFIX, OPTIMIZER_PREFIX, WeightMap
from modelling.weights.optimizer_state import convert_optimizer_state, optimizer_state_specs
from planning.hardware.announce_devices import announce_devices
from planning.hardware.memory_check import check_lower_bound
from run.base_model_ref import BaseModelRef, metadata_of, weight_names
from run.best_checkpoint import print_best_step
from run.model_weights import check_checkpoint, has_adapters, load_base_below, read_weights
from run.quantized_cache import with_quantized_cache
from run.weight_checks import DigestChecked, check_digests, check_finite
from terminal.screen import is_first_process, say

Used = TypeVar("Used")

_COMPARED_BY_DIGEST = ("data.train", "data.validation", "data.tokenizer", "data.chat_template")
"""These may name the same data in several ways."""


@dataclass(frozen=True)
class InitialState:
    """State that a run starts from.

    Attributes:
        tensors: weights by logical name and, for a resumed run, optimizer state.
        digest_checked: the tensors whose digests must not change while a run starts to train.
        step: number of optimizer steps done.
        data: state of the data loader; None: start of the data.
        source: origin of the state, for messages.
        skipped_steps: number of skipped optimizer steps so far.
        best: state of the best checkpoint; None: none.
        sha256: digest of the files that were read, if known.
        checkpoint: the checkpoint, if the state is from one.
        base: reference to the model of the frozen weights; None: unknown.
        reload: resolves the state again.
        anew: advice on how to start a new run instead of resuming.
    """

    tensors: Arrays
    digest_checked: DigestChecked | None = None
    step: int = 0
    data: dict[str, Any] | None = None
    source: str = "random weights"
    skipped_steps: int = 0
    best: dict[str, Any] | None = None
    sha256: str = ""
    checkpoint: SavedCheckpoint | None = None
    base: BaseModelRef | None = None
    reload: Callable[[], InitialState] | None = None
    restart_hint: str = ""

    def load_with_fallback(self, use: Callable[[InitialState], Used]) -> tuple[InitialState, Used]:
        """Call `use` with this state; if it is damaged, with that of the step before.

        Values are verified when they are read, so that each is read once.

        Args:
            use: raises DamagedError on all processes, as sessions do.

        Returns:
            The state that was used, and the result of `use`.

        Raises:
            CheckpointError: there is no undamaged step.
        """
        start = self
        while True:
            try:
                return start, use(start)
            except DamagedError as error:
                if start.checkpoint is None or start.reload is None:
                    raise
                start.checkpoint.mark_damaged(str(error))
            start = start.reload()


def _reloadable(find: Callable[[], InitialState]) -> InitialState:
    return replace(find(), reload=partial(_reloadable, find))


def resolve_initial_state(
    config: RunConfig, weight_map: WeightMap, fresh: bool = False
) -> InitialState:
    """Resolve the state that a training run starts from.

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

    def found() -> InitialState:
        start = _resolve_once(config, weight_map, fresh)
        known = {} if start.base is None else start.base.sha256  # these are verified
        tensors = check_digests(
            start.tensors, start.source, {*weight_map.frozen_names} - known.keys()
        )
        cached = with_quantized_cache(config, tensors, known or tensors.sha256)
        return replace(start, tensors=cached, digest_checked=tensors)

    return _reloadable(found)


def _resolve_once(config: RunConfig, weight_map: WeightMap, fresh: bool) -> InitialState:
    load, save = config.checkpoint.load, config.checkpoint.save
    check_same_on_all_processes(
        {f"steps in {n}": _has_steps(at) for n, at in {"--save": save, "--load": load}.items()}
    )
    if save is not None and not fresh and has_checkpoint(save):
        checkpoint = load_checkpoint(save, verify=False)
        saved = flattened(_optional_object(metadata_of(checkpoint), "config") or {})
        if not _is_within(load, save) or saved.get("checkpoint.load") == load:
            _check_same_run(saved, config, save)
            model = None if load == RANDOM or _has_steps(load) else load
            return _resume_from(
                config, checkpoint, weight_map, save, "--overwrite starts over", model
            )
    if load is not None and config.checkpoint.load_optimizer and _has_steps(load):
        checkpoint = _open_checkpoint(config, weight_map, load)
        other = ", with another --save" if save is not None and _is_within(load, save) else ""
        restart_hint = f"--checkpoint.load_optimizer false{other} starts a new run from its weights"
        return _resume_from(config, checkpoint, weight_map, load, restart_hint)
    start = _weights_state(config, weight_map, load or RANDOM)
    text = f"the weights of {start.source}" if start.checkpoint is not None else start.source
    return replace(start, source=text)


def _has_steps(place: str | None) -> bool:
    return place is not None and place != RANDOM and has_checkpoint(place)


def _open_checkpoint(config: RunConfig, weight_map: WeightMap, load: str) -> SavedCheckpoint:
    """Load the checkpoint at a location. Raises CheckpointError if adapters are given twice."""
    checkpoint = load_checkpoint(load, verify=False)
    if config.adapter.load is not None and has_adapters(weight_map, checkpoint):
        raise CheckpointError(
            f"the run in {format_path(load)} has adapters of its own: leave out --adapter.load, or "
            "--load the model that they are for"
        )
    return checkpoint


def _weights_state(
    config: RunConfig, weight_map: WeightMap, load: str, needs_base: bool = True
) -> InitialState:
    """Return a state with weights only.

    Its base is the checkpoint's own base model if that has all frozen weights, else the checkpoint.
    """
    checkpoint = _open_checkpoint(config, weight_map, load) if _has_steps(load) else None
    weights, sha256 = read_weights(config, weight_map, load, checkpoint, needs_base)
    if checkpoint is None:
        is_random = load == RANDOM
        base = BaseModelRef(RANDOM) if is_random else BaseModelRef.from_location(load)
        source = "random weights" if is_random else load
        return InitialState(weights, source=source, sha256=sha256, base=base)
    own = BaseModelRef.from_checkpoint(checkpoint)
    if own is None or not own.sha256.keys() >= {*weight_map.frozen_names}:
        own = BaseModelRef.from_location(checkpoint.path, checkpoint.sha256)
    source = f"step {checkpoint.step} in {load}"
    return InitialState(weights, source=source, sha256=sha256, checkpoint=checkpoint, base=own)


def _resume_from(
    config: RunConfig,
    checkpoint: SavedCheckpoint,
    weight_map: WeightMap,
    folder: str,
    restart_hint: str,
    model: str | None = None,
) -> InitialState:
    """Return the state of a run that is resumed from a checkpoint.

    Args:
        anew: advice on how to start a new run instead.
        model: location of the base model, if it is given.
    """
    check_checkpoint(config, weight_map, checkpoint, folder)
    if not any(name.startswith(f"{OPTIMIZER_PREFIX}/") for name in checkpoint.tensors):
        raise CheckpointError(
            f"the checkpoint in {folder} has no optimizer state to continue with: {restart_hint}"
        )
    if set(weight_names(checkpoint)) != {weight.name for weight in weight_map.trainable_weights}:
        raise CheckpointError(
            f"the run in {format_path(folder)} trains other weights than training.trainable and "
            f"frozen mean: continue it as it was; {restart_hint}"
        )
    tensors = check_finite(config, checkpoint.tensors, folder)
    kept, specs = (
        optimizer_state_specs(config, weight_map),
        {n: checkpoint.tensors.spec(n) for n in tensors},
    )
    state = convert_optimizer_state(tensors, specs, kept, config)
    if isinstance(state, str):
        raise CheckpointError(
            f"the checkpoint in {format_path(folder)} has no {state} of shape {kept[state].shape}, "
            f"which {config.training.optimizer.name} as configured needs: continue with that run's "
            f"optimizer; {restart_hint}"
        )
    changed = ", its optimizer state in another form from now on" if state is not tensors else ""
    metadata = metadata_of(checkpoint)
    return InitialState(
        load_base_below(config, state, checkpoint, weight_map, folder, model),
        step=checkpoint.step,
        data=_optional_object(metadata, "data"),
        source=f"step {checkpoint.step} in {folder}{changed}",
        skipped_steps=metadata.count("skipped_steps") if "skipped_steps" in metadata else 0,
        best=_optional_object(metadata, "best"),
        sha256=checkpoint.sha256,
        checkpoint=checkpoint,
        base=BaseModelRef.from_checkpoint(checkpoint),
        restart_hint=restart_hint,
    )


def _optional_object(metadata: JsonObject, name: str) -> dict[str, Any] | None:
    """Return an object of the metadata; None without it."""
    return None if metadata.data.get(name) is None else metadata.mapping(name)


def _is_within(load: str | None, save: str) -> bool:
    """True if `load` is the run folder `save`, or a step in it."""
    return load is not None and Path(load).resolve().is_relative_to(Path(save).resolve())


def base_model_metadata(start: InitialState, weight_map: WeightMap) -> dict[str, Any]:
    """Return metadata about the weights that checkpoints do not contain, on process 0; collective.

    Called when the weights have been read.

    Raises:
        CheckpointError: a process has read other weights than process 0.
    """
    if not weight_map.frozen_names:
        return {}
    base, tensors = start.base, start.digest_checked
    assert base is not None, "who starts to train knows where its weights are"
    assert tensors is not None, "see `resolve_initial_state`"
    if base.sha256:
        return base.to_metadata({name: base.sha256[name] for name in weight_map.frozen_names})
    own = tensors.digests(weight_map.frozen_names) if is_first_process() else None
    first: Mapping[str, str] = popdist.all_gather_object(own)[0]
    for name, sha256 in tensors.sha256.items():
        if first.get(name, sha256) != sha256:
            raise tensors.changed(name)
    return base.to_metadata(first) if is_first_process() else {}


def _check_same_run(saved: Mapping[str, Any], config: RunConfig, folder: str) -> None:
    """Raise CheckpointError if the run in a folder has another model or other data.

    Args:
        saved: that run's config by dotted path, as far as it is known.
    """
    now = flattened(config.to_dict())
    for name in sorted(saved.keys() & now.keys()):
        if name in _COMPARED_BY_DIGEST or not name.startswith(("model.", "data.")):
            continue
        if saved[name] != now[name]:
            raise CheckpointError(
                f"{format_path(folder)} has a run with {name} {format_name(saved[name], 35)}, but "
                f"this one has {format_name(now[name], 35)}: continue that run as it was, give "
                "another --save, or --overwrite to delete it and start over"
            )


def load_weights(config: RunConfig, weight_map: WeightMap, needs_base: bool = True) -> InitialState:
    """Load the weights that `checkpoint.load` names, and FP8 state if needed, for inference.

    For a run these are the weights of its newest step, which is printed.

    Args:
        needs_base: see `run.model_weights.load_base_below`.

    Raises:
        UserError: as `resolve_initial_state`, or `checkpoint.load` is not given.
    """
    load = config.checkpoint.load
    if load is None or load == RANDOM:
        raise CheckpointError(
            "there are no weights: give --load DIR, a folder that run_finetuning.py --save wrote, "
            "or a Hugging Face model"
        )
    return _reloadable(lambda: _load_weights(config, weight_map, load, needs_base))


def _load_weights(
    config: RunConfig, weight_map: WeightMap, load: str, needs_base: bool
) -> InitialState:
    needs_scales = config.fp8.enabled and config.fp8.recipe == "delayed"
    no_scales = CheckpointError(
        f"{load} has no FP8 scales: train with --fp8.enabled, or give "
        "--fp8.recipe current, whose scales follow from the operands"
    )
    if needs_scales and not has_checkpoint(load):
        raise no_scales
    start = _weights_state(config, weight_map, load, needs_base)
    if start.checkpoint is None:
        return start
    tensors, files = start.tensors, start.checkpoint.tensors
    if needs_scales:
        names = [n for n in files if n.startswith(f"{FP8_PREFIX}/")]
        if not names:
            raise no_scales
        tensors = OverlayArrays(check_finite(config, files, load, names), tensors)
    say(f"the weights are those of {start.source}")
    print_best_step(load)
    return replace(start, tensors=tensors, step=start.checkpoint.step)


def load_inference_weights(config: RunConfig) -> InitialState:
    """Check memory and devices, and load the weights; the same on all processes.

    Raises as `load_weights`.
    """
    check_lower_bound(config)
    announce_devices(config)
    start = load_weights(config, get_family(config).weight_map(config))
    check_same_on_all_processes(
        {"step of the weights": start.step, "digest of the weights": start.sha256}
    )
    return start
