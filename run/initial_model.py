"""The frozen model that a run starts from, to which its objective compares the trained one.

It has the weights that the run started with; as a reference without adapters, as the policy that
wrote rollouts with them. Its outputs over samples are computed once (`run.frozen_outputs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import SavedCheckpoint, has_checkpoint, load_checkpoint
from config.adapter import Adapter
from config.errors import UserError
from config.sections import RunConfig
from files.formatting import format_path
from files.run_folder import RunFolder
from modelling.model_family import get_family
from run.base_model_ref import BaseModelRef, metadata_of
from run.frozen_outputs import FrozenModel, json_sha256
from run.frozen_outputs_file import remove_stale_drafts
from run.initial_state import InitialState
from run.model_weights import has_adapters, read_weights
from run.weight_checks import DigestCheckedTensors, check_digests
from terminal.screen import is_first_process

REFERENCE, POLICY = "reference", "policy"
"""Metadata keys: digest of the weights without and with adapters."""

ORIGIN, ORIGIN_STEP = "reference_origin", "reference_step"
"""Metadata keys: origin of the weights, and its digest if it is a step."""


@dataclass(frozen=True)
class InitialModel:
    """Frozen model that a run starts from.

    Attributes:
        role: `REFERENCE`, without adapters, or `POLICY`, with them.
        config: config of the run.
        folder: folder of the cache files.
        sha256: digest of its weights.
        origin: model, checkpoint, or "random" that the run started from; None: unknown.
        weights: returns the weights; raises UserError if they are no longer available.
        previous_folder: cache folder of the run that this one resumes, if it is another folder.
    """

    role: str
    config: RunConfig
    folder: Path
    sha256: str
    origin: BaseModelRef | None
    weights: Callable[[], Mapping[str, np.ndarray]]
    previous_folder: Path | None = None

    @classmethod
    def for_run(
        cls, config: RunConfig, initial_state: InitialState, folder: RunFolder, role: str
    ) -> InitialModel:
        """Return the model that a training run started from, also if it resumes."""
        location = Path(config.training.reference_cache or folder.reference_folder)
        checkpoint = initial_state.checkpoint
        if initial_state.step and checkpoint is not None and role in checkpoint.metadata:
            saved = cls._from_metadata(config, checkpoint, location, role)
            return replace(
                saved,
                previous_folder=RunFolder.from_step_folder(checkpoint.path).reference_folder,
            )
        sha256 = _weights_sha256(config, initial_state.digest_checked, role)
        origin = _origin_of_initial_state(initial_state)
        return cls(role, config, location, sha256, origin, lambda: initial_state.tensors)

    @classmethod
    def from_checkpoint(
        cls, config: RunConfig, initial_state: InitialState, role: str
    ) -> InitialModel:
        """Return the model that the run in `checkpoint.load` started from.

        Raises:
            UserError: `checkpoint.load` is no run that says it.
        """
        checkpoint = initial_state.checkpoint
        if checkpoint is None or role not in checkpoint.metadata:
            raise UserError(
                f"{config.training.objective} compares with a reference, which only a run of "
                "run_finetuning.py has: --load its folder"
            )
        run = RunFolder.from_step_folder(checkpoint.path)
        folder = config.training.reference_cache or run.reference_folder
        return cls._from_metadata(config, checkpoint, Path(folder), role)

    @classmethod
    def _from_metadata(
        cls, config: RunConfig, checkpoint: SavedCheckpoint, folder: Path, role: str
    ) -> InitialModel:
        metadata = metadata_of(checkpoint)
        sha256 = metadata.get_text(role)
        step = metadata.get_text(ORIGIN_STEP) if ORIGIN_STEP in metadata else None
        origin = BaseModelRef(metadata.get_text(ORIGIN), step=step) if ORIGIN in metadata else None
        location = None if origin is None else origin.find_checkpoint(checkpoint.path)
        return cls(
            role, config, folder, sha256, origin,
            lambda: _weights_at_origin(config, sha256, location, folder, role),
        )  # fmt: skip

    def to_metadata(self) -> dict[str, Any]:
        """Return the model's origin and SHA-256, to store in checkpoints."""
        if self.origin is None:
            return {self.role: self.sha256}
        step = {} if self.origin.step is None else {ORIGIN_STEP: self.origin.step}
        return {self.role: self.sha256, ORIGIN: self.origin.name, **step}

    def remove_drafts(self) -> None:
        """Delete unfinished cache files of outputs that no process is writing."""
        if self.config.training.reference_cache is None and is_first_process():
            remove_stale_drafts(self.folder)

    @property
    def model(self) -> FrozenModel:
        """The frozen model, to compute its outputs over samples."""
        return FrozenModel(
            f"the {self.role}",
            _frozen_config(self.config, self.role),
            self.sha256,
            self.weights,
            self.folder,
            self.previous_folder,
        )


def _weights_sha256(config: RunConfig, tensors: DigestCheckedTensors | None, role: str) -> str:
    weight_map = get_family(config).weight_map(_frozen_config(config, role))
    assert tensors is not None, "what has a digest stays as it is"
    return json_sha256(dict(tensors.digests(weight.name for weight in weight_map.weights)))


def _origin_of_initial_state(initial_state: InitialState) -> BaseModelRef | None:
    """Return the reference to the model whose weights a new run starts from."""
    if initial_state.checkpoint is not None:
        return BaseModelRef.from_location(
            initial_state.checkpoint.path, initial_state.checkpoint.sha256
        )
    return initial_state.base


def _weights_at_origin(
    config: RunConfig, sha256: str, origin: str | None, folder: Path, role: str
) -> Mapping[str, np.ndarray]:
    """Read the weights that a run started from, from there or from `checkpoint.base_model`.

    Raises:
        UserError: neither has them.
    """
    places, reasons = [p for p in (origin, config.checkpoint.base_model) if p is not None], []
    for location in places:
        try:
            weights = check_digests(_initial_weights(config, location, role), location)
            if _weights_sha256(config, weights, role) == sha256:
                return weights
            reasons.append(
                f"{format_path(location)} does not hold the model that the run began with"
            )
        except UserError as error:
            reasons.append(
                f"{format_path(location)} does not hold the model that the run began with: {error}"
            )
    raise UserError(
        f"the {role} is not in {format_path(folder)}, and must be computed again, but "
        f"{'; '.join(reasons) or 'nothing says which model the run began with'}: give the folder "
        "of that model by --checkpoint.base_model, or that of the reference by "
        "--training.reference_cache"
    )


def _initial_weights(config: RunConfig, location: str, role: str) -> Mapping[str, np.ndarray]:
    """Read the weights at a location; as a reference with adapters only if they are trained there.

    Those are a part of the base model of later adapters.
    """
    weight_map = get_family(config).weight_map(config)
    if role == REFERENCE and not (
        has_checkpoint(location)
        and has_adapters(weight_map, load_checkpoint(location, verify=False))
    ):
        weight_map = weight_map.without_adapters
    return read_weights(config, weight_map, location)[0]


def _frozen_config(config: RunConfig, role: str) -> RunConfig:
    """Return the config of the frozen model: in evaluation mode; as a reference, without adapters.

    Its frozen weights have no delayed FP8 scales, which follow from training steps.
    """
    adapter = Adapter() if role == REFERENCE else config.adapter
    fp8 = replace(config.fp8, recipe="current")
    return replace(config, adapter=adapter, model=replace(config.model, eval=True), fp8=fp8)
