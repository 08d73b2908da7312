"""The reference that preferences are learned against: the log-probabilities of all texts by the
weights that a run begins with, without adapters. They are computed before the first step.

A file holds those of some samples. Its name is a digest of all that they follow from: the weights,
the model's settings, and the samples, which template, truncation and number are in. While it is
made there is a draft of it, which the same command goes on with; see `run.logps_cache`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import popdist
from checkpoints import SavedCheckpoint, has_checkpoint, load_checkpoint
from checkpoints.safetensors_files import sha256_of_bytes
from config.adapter import Adapter
from config.errors import UserError
from config.sections import RunConfig
from data.preference_samples import NUM_LOSS_TOKENS, SamplesWithRefLogps
from data.samples import Samples
from files.errors import WriteError
from files.formatting import format_path
from files.run_folder import RunFolder
from modelling.model_family import get_family
from modelling.objectives import make_objective
from run.base_model_ref import BaseModelRef, metadata_of
from run.initial_state import InitialState
from run.logps_cache import (
    DRAFT,
    LogpsDraftFile,
    Shape,
    read_logps,
    remove_stale_drafts,
    write_logps,
)
from run.model_weights import has_adapters, read_weights
from run.weight_checks import DigestChecked, check_digests
from sessions.loss_evaluation import LossSession
from sessions.session import compile_session
from terminal.screen import is_first_process, progress_bar, say

REFERENCE, ORIGIN, ORIGIN_STEP = "reference", "reference_origin", "reference_step"
"""Keys of a checkpoint's metadata: digest of the reference's weights, where they were read, and the
digest of that step if it is one."""


@dataclass(frozen=True)
class ReferenceLogps:
    """What a run knows of its reference.

    Attributes:
        config: of the run.
        folder: of the files.
        sha256: digest of the reference's weights.
        origin: the model, checkpoint, or "random" that the run began with; None: not known.
        weights: gives them; raises UserError where the run has trained them and they are gone.
        before: the folder of a run that this one goes on with, which may have files.
    """

    config: RunConfig
    folder: Path
    sha256: str
    origin: BaseModelRef | None
    weights: Callable[[], Mapping[str, np.ndarray]]
    before: Path | None = None

    @classmethod
    def for_run(
        cls, config: RunConfig, start: InitialState, folder: RunFolder
    ) -> ReferenceLogps | None:
        """The reference of a run that begins, or goes on, in a folder; None: it needs none."""
        objective = make_objective(config)
        if REFERENCE not in objective.sequence_inputs:
            return None
        place = Path(config.training.reference_cache or folder.reference)
        if start.step and start.checkpoint is not None and REFERENCE in start.checkpoint.metadata:
            saved = cls._saved(config, start.checkpoint, place)
            return replace(
                saved, before=RunFolder.from_step_folder(start.checkpoint.path).reference
            )
        sha256 = _digest_of_weights(config, start.digest_checked)
        return cls(config, place, sha256, _origin(start), lambda: start.tensors)

    @classmethod
    def from_checkpoint(cls, config: RunConfig, start: InitialState) -> ReferenceLogps | None:
        """The reference of a run of which `checkpoint.load` names a state; None: it needs none.

        Raises:
            UserError: it names something else.
        """
        if REFERENCE not in make_objective(config).sequence_inputs:
            return None
        checkpoint = start.checkpoint
        if checkpoint is None or REFERENCE not in checkpoint.metadata:
            raise UserError(
                f"{config.training.objective} compares with a reference, which only a run of "
                "run_finetuning.py has: --load its folder"
            )
        run = RunFolder.from_step_folder(checkpoint.path)
        folder = config.training.reference_cache or run.reference
        return cls._saved(config, checkpoint, Path(folder))

    @classmethod
    def _saved(cls, config: RunConfig, checkpoint: SavedCheckpoint, folder: Path) -> ReferenceLogps:
        metadata = metadata_of(checkpoint)
        sha256 = metadata.text(REFERENCE)
        step = metadata.text(ORIGIN_STEP) if ORIGIN_STEP in metadata else None
        origin = BaseModelRef(metadata.text(ORIGIN), step=step) if ORIGIN in metadata else None
        place = None if origin is None else origin.place(checkpoint.path)
        return cls(
            config, folder, sha256, origin,
            lambda: _weights_at_origin(config, sha256, place, folder),
        )  # fmt: skip

    def record(self) -> dict[str, Any]:
        """Metadata for checkpoints."""
        if self.origin is None:
            return {REFERENCE: self.sha256}
        step = {} if self.origin.step is None else {ORIGIN_STEP: self.origin.step}
        return {REFERENCE: self.sha256, ORIGIN: self.origin.name, **step}

    def of(self, samples: Samples) -> SamplesWithRefLogps:
        """The samples with the log-probabilities of their texts, from a file or computed. All
        processes call it together.

        Raises:
            UserError: there is no file, and the weights are no more.
        """
        path = self.folder / f"{self._name(samples)}.safetensors"
        shape = len(samples), len(samples.take(np.zeros(1, np.int64))[NUM_LOSS_TOKENS]), 2
        found = read_logps(path, shape)
        if not all(popdist.all_gather_object(found is not None)):
            found = None if self.before is None else read_logps(self.before / path.name, shape)
            if all(popdist.all_gather_object(found is not None)) and found is not None:
                _keep(path, found)
            else:
                found = self._compute(samples, path, shape)
        assert found is not None, "all processes have it, or compute it together"
        return SamplesWithRefLogps(samples, found)

    def remove_drafts(self) -> None:
        """Delete the drafts that passes of other settings left in the run's own folder."""
        if self.config.training.reference_cache is None and is_first_process():
            remove_stale_drafts(self.folder)

    def _name(self, samples: Samples) -> str:
        config = _base(self.config)
        settings = {**config.model.to_dict(), "dropout_prob": None, "eval": None}
        if config.fp8.enabled:
            settings["fp8"] = config.fp8.to_dict()
        return _digest([self.sha256, config.family, settings, samples.digest, len(samples)])

    def _compute(self, samples: Samples, path: Path, shape: Shape) -> np.ndarray:
        config, weights, first_process = _base(self.config), self.weights(), is_first_process()
        with LogpsDraftFile(path.with_suffix(DRAFT), shape, first_process) as draft:
            first = min(popdist.all_gather_object(draft.known))
            logps = draft.begin(first)
            if first < len(samples):
                say(f"the reference: {len(samples) - first} of {len(samples)} samples to compute")
                model = compile_session(lambda: LossSession(config), "the program of the reference")
                model.write(weights)
                unknown = SamplesWithRefLogps(samples, np.zeros(logps.shape, np.float32))
                bar = progress_bar("reference", len(samples), "sample", first)
                with model, bar:
                    for part, found in model.loss_stats(unknown, first):
                        logps[part] = found
                        draft.add(logps[part])
                        bar.update(part.stop - part.start)
            finite = bool(np.isfinite(logps).all())  # all processes know all of them
            if not finite or _keep(path, logps):
                draft.remove()
        if not finite:
            raise UserError("a log-probability of the reference is not finite: its weights cannot "
                            "be compared with")  # fmt: skip
        return logps


def _digest_of_weights(config: RunConfig, tensors: DigestChecked | None) -> str:
    names = [weight.name for weight in get_family(config).weight_map(_base(config)).weights]
    assert tensors is not None, "what has a digest stays as it is"
    return _digest(dict(tensors.digests(names)))


def _origin(start: InitialState) -> BaseModelRef | None:
    """Where a run that begins found its weights."""
    if start.checkpoint is not None:
        return BaseModelRef.at(start.checkpoint.path, start.checkpoint.sha256)
    return start.base


def _weights_at_origin(
    config: RunConfig, sha256: str, origin: str | None, folder: Path
) -> Mapping[str, np.ndarray]:
    """Read the weights that a run began with, from their origin or `checkpoint.base_model`.

    Raises:
        UserError: neither has them.
    """
    places, reasons = [p for p in (origin, config.checkpoint.base_model) if p is not None], []
    for place in places:
        try:
            weights = check_digests(_initial_weights(config, place), place)
            if _digest_of_weights(config, weights) == sha256:
                return weights
            reasons.append(f"{format_path(place)} does not hold the model that the run began with")
        except UserError as error:
            reasons.append(
                f"{format_path(place)} does not hold the model that the run began with: {error}"
            )
    raise UserError(
        f"the reference is not in {format_path(folder)}, and must be computed again, but "
        f"{'; '.join(reasons) or 'nothing says which model the run began with'}: give the folder "
        "of that model by --checkpoint.base_model, or that of the reference by "
        "--training.reference_cache"
    )


def _initial_weights(config: RunConfig, place: str) -> Mapping[str, np.ndarray]:
    """The weights at a place; adapters only where a checkpoint has some, since the reference has
    none."""
    weight_map = get_family(config).weight_map(config)
    trained = has_checkpoint(place) and has_adapters(
        weight_map, load_checkpoint(place, verify=False)
    )
    return read_weights(config, weight_map if trained else weight_map.base, place)[0]


def _base(config: RunConfig) -> RunConfig:
    """The configuration of the reference, as it is evaluated. Its weights are frozen, so there is
    no step that delayed FP8 scales could follow from."""
    fp8 = replace(config.fp8, recipe="current")
    return replace(config, adapter=Adapter(), model=replace(config.model, eval=True), fp8=fp8)


def _digest(of: Any) -> str:
    return sha256_of_bytes(json.dumps(of, sort_keys=True).encode())


def _keep(path: Path, logps: np.ndarray) -> bool:
    """Write a file, which is a cache: returns false, after a warning, if that fails. Process 0
    does."""
    if is_first_process():
        try:
            write_logps(path, logps)
        except WriteError as error:
            say(f"warning: {error}; the next start computes the reference again")
            return False
    return True
