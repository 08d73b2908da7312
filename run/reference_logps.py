"""Log-probabilities of the frozen reference model in preference training, computed once and cached.

The reference model has the weights that the run started with, without adapters
(`run.frozen_outputs`).
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
from data.preference_samples import NUM_LOSS_TOKENS, REF_LOGPS, SamplesWithRefLogps
from data.samples import Samples
from files.formatting import format_path
from files.run_folder import RunFolder
from modelling.model_family import get_family
from modelling.objectives import make_objective
from run.base_model_ref import BaseModelRef, metadata_of
from run.frozen_outputs import FrozenModel, OutputKind, as_rows, json_sha256
from run.frozen_outputs_file import remove_stale_drafts
from run.initial_state import InitialState
from run.model_weights import has_adapters, read_weights
from run.weight_checks import DigestCheckedTensors, check_digests
from terminal.screen import is_first_process

REFERENCE, ORIGIN, ORIGIN_STEP = "reference", "reference_origin", "reference_step"
"""Metadata keys: digest of the reference weights, their origin, and its digest if it is a step."""

PAIR_LOGPS = np.dtype([(REF_LOGPS, "<f4", (2,))])
"""Row of a cache file: the log-probabilities of a pair's answers."""


@dataclass(frozen=True)
class ReferenceLogps:
    """Frozen reference model of preference training, with its cached log-probabilities.

    Attributes:
        config: config of the run.
        folder: folder of the cache files.
        sha256: digest of the reference model's weights.
        origin: model, checkpoint, or "random" that the run started from; None: unknown.
        weights: returns the weights; raises UserError if they are no longer available.
        before: cache folder of the run that this one resumes, if it is another folder.
    """

    config: RunConfig
    folder: Path
    sha256: str
    origin: BaseModelRef | None
    weights: Callable[[], Mapping[str, np.ndarray]]
    previous_folder: Path | None = None

    @classmethod
    def for_run(
        cls, config: RunConfig, start: InitialState, folder: RunFolder
    ) -> ReferenceLogps | None:
        """Return the reference model of a training run; None if the objective needs none."""
        objective = make_objective(config)
        if REF_LOGPS not in objective.sequence_inputs:
            return None
        location = Path(config.training.reference_cache or folder.reference)
        if start.step and start.checkpoint is not None and REFERENCE in start.checkpoint.metadata:
            saved = cls._from_metadata(config, start.checkpoint, location)
            return replace(
                saved, previous_folder=RunFolder.from_step_folder(start.checkpoint.path).reference
            )
        sha256 = _weights_sha256(config, start.digest_checked)
        return cls(config, location, sha256, _reference_origin(start), lambda: start.tensors)

    @classmethod
    def from_checkpoint(cls, config: RunConfig, start: InitialState) -> ReferenceLogps | None:
        """Return the reference model of the run in `checkpoint.load`; None if none is needed.

        Raises:
            UserError: `checkpoint.load` is no run with a reference.
        """
        if REF_LOGPS not in make_objective(config).sequence_inputs:
            return None
        checkpoint = start.checkpoint
        if checkpoint is None or REFERENCE not in checkpoint.metadata:
            raise UserError(
                f"{config.training.objective} compares with a reference, which only a run of "
                "run_finetuning.py has: --load its folder"
            )
        run = RunFolder.from_step_folder(checkpoint.path)
        folder = config.training.reference_cache or run.reference
        return cls._from_metadata(config, checkpoint, Path(folder))

    @classmethod
    def _from_metadata(
        cls, config: RunConfig, checkpoint: SavedCheckpoint, folder: Path
    ) -> ReferenceLogps:
        metadata = metadata_of(checkpoint)
        sha256 = metadata.text(REFERENCE)
        step = metadata.text(ORIGIN_STEP) if ORIGIN_STEP in metadata else None
        origin = BaseModelRef(metadata.text(ORIGIN), step=step) if ORIGIN in metadata else None
        location = None if origin is None else origin.find_checkpoint(checkpoint.path)
        return cls(
            config, folder, sha256, origin,
            lambda: _weights_at_origin(config, sha256, location, folder),
        )  # fmt: skip

    def to_metadata(self) -> dict[str, Any]:
        """Return the reference model's origin and SHA-256, to store in checkpoints."""
        if self.origin is None:
            return {REFERENCE: self.sha256}
        step = {} if self.origin.step is None else {ORIGIN_STEP: self.origin.step}
        return {REFERENCE: self.sha256, ORIGIN: self.origin.name, **step}

    def add_to(self, samples: Samples) -> SamplesWithRefLogps:
        """Add the reference model's log-probabilities, cached or computed, to samples; collective.

        Raises:
            UserError: the cache has no file, and the weights are no longer available.
        """
        pairs = len(samples.take(np.zeros(1, np.int64))[NUM_LOSS_TOKENS])
        unknown = SamplesWithRefLogps(samples, np.zeros((len(samples), pairs, 2), np.float32))
        kind = OutputKind(
            "logps",
            PAIR_LOGPS,
            rows_per_sample=lambda samples: np.full(len(samples), pairs),
            to_rows=lambda stats, _: as_rows(stats, PAIR_LOGPS),
        )
        with self.model.outputs(unknown, kind) as file:
            logps = file.rows(range(len(samples)))[REF_LOGPS]
        return replace(unknown, ref_logps=logps.reshape(unknown.ref_logps.shape))

    def remove_drafts(self) -> None:
        """Delete unfinished cache files of log-probabilities that no process is writing."""
        if self.config.training.reference_cache is None and is_first_process():
            remove_stale_drafts(self.folder)

    @property
    def model(self) -> FrozenModel:
        """The reference model, to compute its outputs over samples."""
        return FrozenModel(
            "the reference",
            _reference_config(self.config),
            self.sha256,
            self.weights,
            self.folder,
            self.previous_folder,
        )


def _weights_sha256(config: RunConfig, tensors: DigestCheckedTensors | None) -> str:
    names = [
        weight.name for weight in get_family(config).weight_map(_reference_config(config)).weights
    ]
    assert tensors is not None, "what has a digest stays as it is"
    return json_sha256(dict(tensors.digests(names)))


def _reference_origin(start: InitialState) -> BaseModelRef | None:
    """Return the reference to the model whose weights a new run starts from."""
    if start.checkpoint is not None:
        return BaseModelRef.from_location(start.checkpoint.path, start.checkpoint.sha256)
    return start.base


def _weights_at_origin(
    config: RunConfig, sha256: str, origin: str | None, folder: Path
) -> Mapping[str, np.ndarray]:
    """Read the weights that a run started from, from there or from `checkpoint.base_model`.

    Raises:
        UserError: neither has them.
    """
    places, reasons = [p for p in (origin, config.checkpoint.base_model) if p is not None], []
    for location in places:
        try:
            weights = check_digests(_initial_weights(config, location), location)
            if _weights_sha256(config, weights) == sha256:
                return weights
            reasons.append(
                f"{format_path(location)} does not hold the model that the run began with"
            )
        except UserError as error:
            reasons.append(
                f"{format_path(location)} does not hold the model that the run began with: {error}"
            )
    raise UserError(
        f"the reference is not in {format_path(folder)}, and must be computed again, but "
        f"{'; '.join(reasons) or 'nothing says which model the run began with'}: give the folder "
        "of that model by --checkpoint.base_model, or that of the reference by "
        "--training.reference_cache"
    )


def _initial_weights(config: RunConfig, location: str) -> Mapping[str, np.ndarray]:
    """Read the weights at a location, with adapters only if its checkpoint has adapters."""
    weight_map = get_family(config).weight_map(config)
    trained = has_checkpoint(location) and has_adapters(
        weight_map, load_checkpoint(location, verify=False)
    )
    return read_weights(config, weight_map if trained else weight_map.without_adapters, location)[0]


def _reference_config(config: RunConfig) -> RunConfig:
    """Return the config of the reference model: in evaluation mode, without adapters.

    Its frozen weights have no delayed FP8 scales, which follow from training steps.
    """
    fp8 = replace(config.fp8, recipe="current")
    return replace(config, adapter=Adapter(), model=replace(config.model, eval=True), fp8=fp8)
