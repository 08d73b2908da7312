"""Loading of model weights: those that a run starts from, and those of inference."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from checkpoints import CheckpointError
from checkpoints.lazy_arrays import OverlayArrays
from config.process_checks import check_same_on_all_processes
from config.run import RANDOM
from config.sections import RunConfig
from files.formatting import format_path
from modelling.model_family import get_family
from modelling.weights import FP8_PREFIX, WeightMap
from planning.hardware.announce_devices import announce_devices
from planning.hardware.memory_check import check_lower_bound
from run.base_model_ref import BaseModelRef
from run.best_checkpoint import print_best_step
from run.initial_state import InitialState, with_reload_function
from run.model_weights import has_adapters, read_weights
from run.weight_checks import check_finite
from terminal.screen import say

if TYPE_CHECKING:
    from checkpoints import SavedCheckpoint


def has_steps(location: str | None) -> bool:
    """True if a location, such as a run folder, has at least one checkpoint."""
    if location is None or location == RANDOM:
        return False
    from checkpoints import has_checkpoint

    return has_checkpoint(location)


def open_checkpoint(config: RunConfig, weight_map: WeightMap, load: str) -> SavedCheckpoint:
    """Load the checkpoint at a location; raises if it has adapters and `adapter.load` is set."""
    from checkpoints import load_checkpoint

    checkpoint = load_checkpoint(load, verify=False)
    if config.adapter.load is not None and has_adapters(weight_map, checkpoint):
        raise CheckpointError(
            f"the run in {format_path(load)} has adapters of its own: leave out --adapter.load, or "
            "--load the model that they are for"
        )
    return checkpoint


def state_from_weights(
    config: RunConfig, weight_map: WeightMap, load: str, needs_base: bool = True
) -> InitialState:
    """Return an initial state that has only weights, without optimizer state.

    Its base is the checkpoint's own base model if that has all frozen weights, else the checkpoint.
    """
    checkpoint = open_checkpoint(config, weight_map, load) if has_steps(load) else None
    weights, sha256 = read_weights(config, weight_map, load, checkpoint, needs_base)
    if checkpoint is None:
        is_random = load == RANDOM
        base = BaseModelRef(RANDOM) if is_random else BaseModelRef.from_location(load)
        source = "random weights" if is_random else load
        return InitialState(weights, source=source, sha256=sha256, base=base)
    base_ref = BaseModelRef.from_checkpoint(checkpoint)
    if base_ref is None or not base_ref.sha256.keys() >= {*weight_map.frozen_names}:
        base_ref = BaseModelRef.from_location(checkpoint.path, checkpoint.sha256)
    source = f"step {checkpoint.step} in {load}"
    return InitialState(weights, source=source, sha256=sha256, checkpoint=checkpoint, base=base_ref)


def load_weights(config: RunConfig, weight_map: WeightMap, needs_base: bool = True) -> InitialState:
    """Load the weights of `checkpoint.load` for inference, with FP8 scales if needed.

    For a run these are the weights of its newest step, which is printed.

    Args:
        needs_base: see `run.model_weights.load_missing_base_weights`.

    Raises:
        UserError: as `resolve_initial_state`, or `checkpoint.load` is not given.
    """
    load = config.checkpoint.load
    if load is None or load == RANDOM:
        raise CheckpointError(
            "there are no weights: give --load DIR, a folder that run_finetuning.py --save wrote, "
            "or a Hugging Face model"
        )
    return with_reload_function(lambda: _load_weights(config, weight_map, load, needs_base))


def _load_weights(
    config: RunConfig, weight_map: WeightMap, load: str, needs_base: bool
) -> InitialState:
    from checkpoints import has_checkpoint

    needs_scales = config.fp8.enabled and config.fp8.recipe == "delayed"
    no_scales = CheckpointError(
        f"{load} has no FP8 scales: train with --fp8.enabled, or give "
        "--fp8.recipe current, whose scales follow from the operands"
    )
    if needs_scales and not has_checkpoint(load):
        raise no_scales
    start = state_from_weights(config, weight_map, load, needs_base)
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
    """Check memory and devices, then load the weights for inference; equal on all processes.

    Raises as `load_weights`.
    """
    check_lower_bound(config)
    announce_devices(config)
    start = load_weights(config, get_family(config).weight_map(config))
    check_same_on_all_processes(
        {"step of the weights": start.step, "digest of the weights": start.sha256}
    )
    return start
