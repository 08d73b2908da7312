"""The reference that preferences are learned against: the log-probabilities of all texts by the
weights that a run begins with, without adapters. They are computed before the first step.

A file holds those of some samples. Its name is a digest of all that they follow from: the weights,
the model's settings, and the samples, which template, truncation and number are in. While it is
made it is a draft, NaN where nothing is known yet, which the same command goes on with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

import popdist
from checkpoints import Checkpoint, has_checkpoint, load_checkpoint
from checkpoints.digests import digest, digest_of_bytes
from checkpoints.shards import write_shard
from checkpoints.tensor_files import readers
from config.adapter import Adapter
from config.errors import UserError
from config.sections import RunConfig
from data.preferences import COUNTS, Referred
from data.samples import Samples
from files.drafts import sync
from files.errors import FileError
from files.run_folder import RunFolder
from files.shown import shown_path
from files.writing import write_file, writing
from modelling.objectives import objective_of
from modelling.spec import ModelFamily
from modelling.weights import WeightTable
from run.start import Start
from run.weights import has_adapters, metadata_of, weights_at
from sessions.losses import Losses
from sessions.running import compiled
from terminal.screen import is_first_process, say

REFERENCE, ORIGIN = "reference", "reference_origin"
"""Keys of a checkpoint's metadata: digest of the reference's weights, and where they were read."""

_LOGPS = "logps"


@dataclass(frozen=True)
class Reference:
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
    family: ModelFamily
    folder: Path
    sha256: str
    origin: str | None
    weights: Callable[[], Mapping[str, np.ndarray]]
    before: Path | None = None

    @classmethod
    def of_run(
        cls, config: RunConfig, family: ModelFamily, start: Start, folder: RunFolder
    ) -> Reference | None:
        """The reference of a run that begins, or goes on, in a folder; None: it needs none."""
        objective = objective_of(config)
        if REFERENCE not in objective.of_texts:
            return None
        place = Path(config.training.reference or folder.reference)
        if start.step and start.checkpoint is not None and REFERENCE in start.checkpoint.metadata:
            saved = cls._saved(config, family, start.checkpoint, place)
            return replace(saved, before=RunFolder.of_step(start.checkpoint.path).reference)
        sha256 = _digest_of_weights(config, family, start.tensors)
        return cls(config, family, place, sha256, _origin(start), lambda: start.tensors)

    @classmethod
    def of_checkpoint(
        cls, config: RunConfig, family: ModelFamily, start: Start
    ) -> Reference | None:
        """The reference of a run of which `checkpoint.load` names a state; None: it needs none.

        Raises:
            UserError: it names something else.
        """
        if REFERENCE not in objective_of(config).of_texts:
            return None
        checkpoint = start.checkpoint
        if checkpoint is None or REFERENCE not in checkpoint.metadata:
            raise UserError(
                f"{config.training.objective} compares with a reference, which only a run of "
                "run_finetuning.py has: --load its folder"
            )
        folder = config.training.reference or RunFolder.of_step(checkpoint.path).reference
        return cls._saved(config, family, checkpoint, Path(folder))

    @classmethod
    def _saved(
        cls, config: RunConfig, family: ModelFamily, checkpoint: Checkpoint, folder: Path
    ) -> Reference:
        metadata = metadata_of(checkpoint)
        sha256 = metadata.text(REFERENCE)
        origin = metadata.text(ORIGIN) if ORIGIN in metadata.data else None
        return cls(
            config, family, folder, sha256, origin,
            lambda: _weights_at_origin(config, family, sha256, origin, folder),
        )  # fmt: skip

    def record(self) -> dict[str, Any]:
        """Metadata for checkpoints."""
        origin = {} if self.origin is None else {ORIGIN: self.origin}
        return {REFERENCE: self.sha256, **origin}

    def of(self, samples: Samples) -> Referred:
        """The samples with the log-probabilities of their texts, from a file or computed. All
        processes call it together.

        Raises:
            UserError: there is no file, and the weights are no more; or it cannot be written.
        """
        path = self.folder / f"{self._name(samples)}.safetensors"
        found = _read(path)
        if not all(popdist.gather(found is not None)):
            known = None if self.before is None else _read(self.before / path.name)
            if all(popdist.gather(known is not None)) and known is not None:
                _write(path, known)
            else:
                self._compute(samples, path)
            popdist.gather("the reference is there")
            found = _read(path)
        if found is None:
            raise UserError(f"the reference's {shown_path(path)} cannot be read on all processes")
        return Referred(samples, found)

    def _name(self, samples: Samples) -> str:
        config = _base(self.config)
        settings = {**config.model.to_dict(), "dropout_prob": None, "eval": None}
        if config.fp8.enabled:
            settings["fp8"] = config.fp8.to_dict()
        return _digest([self.sha256, config.family, settings, samples.digest, len(samples)])

    def _compute(self, samples: Samples, path: Path) -> None:
        config, weights = _base(self.config), self.weights()
        places = len(samples.take(np.zeros(1, np.int64))[COUNTS])
        draft = path.with_suffix(".draft.npy")
        logps = _draft(draft, (len(samples), places, 2))
        filled = np.isfinite(logps).all(axis=(1, 2))
        first = popdist.gather(int(np.argmin(filled)) if not filled.all() else len(filled))[0]
        if first < len(samples):
            say(f"the reference: {len(samples) - first} of {len(samples)} samples to compute")
            model = compiled(lambda: Losses(config, self.family), "the program of the reference")
            model.write(weights)
            unknown = Referred(samples, np.zeros(logps.shape, np.float32))
            with model, _bar(len(samples), first) as bar:
                for part, found in model.texts(unknown, first):
                    logps[part] = found
                    if is_first_process():
                        logps.flush()
                    bar.update(part.stop - part.start)
        finite = bool(np.isfinite(logps).all())  # all processes know all of them
        if is_first_process():
            if finite:
                _write(path, np.array(logps))
            draft.unlink(missing_ok=True)
        if not finite:
            raise UserError("a log-probability of the reference is not finite: its weights cannot "
                            "be compared with")  # fmt: skip


def _digest_of_weights(
    config: RunConfig, family: ModelFamily, tensors: Mapping[str, np.ndarray]
) -> str:
    names = [weight.name for weight in family.weights(_base(config)).weights]
    with readers() as pool:
        digests = list(pool.map(lambda name: digest(tensors[name]), names))
    return _digest(dict(zip(names, digests, strict=True)))


def _origin(start: Start) -> str | None:
    """Where a run that begins found its weights."""
    if start.checkpoint is not None:
        return str(start.checkpoint.path.resolve())
    return None if start.base is None else start.base.name


def _weights_at_origin(
    config: RunConfig, family: ModelFamily, sha256: str, origin: str | None, folder: Path
) -> Mapping[str, np.ndarray]:
    """Read the weights that a run began with, from their origin or `checkpoint.base`.

    Raises:
        UserError: neither has them.
    """
    places, reasons = [p for p in (origin, config.checkpoint.base) if p is not None], []
    for place in places:
        try:
            weights = _initial_weights(config, family.weights(config), place)
            if _digest_of_weights(config, family, weights) == sha256:
                return weights
            reasons.append(f"{shown_path(place)} does not hold the model that the run began with")
        except UserError as error:
            reasons.append(
                f"{shown_path(place)} does not hold the model that the run began with: {error}"
            )
    raise UserError(
        f"the reference is not in {shown_path(folder)}, and must be computed again, but "
        f"{'; '.join(reasons) or 'nothing says which model the run began with'}: give the folder "
        "of that model by --checkpoint.base, or that of the reference by --training.reference"
    )


def _initial_weights(config: RunConfig, table: WeightTable, place: str) -> Mapping[str, np.ndarray]:
    """The weights at a place; adapters only where a checkpoint has some, since the reference has
    none."""
    trained = has_checkpoint(place) and has_adapters(table, load_checkpoint(place, verify=False))
    return weights_at(config, table if trained else table.base, place)


def _base(config: RunConfig) -> RunConfig:
    """The configuration of the reference, as it is evaluated. Its weights are frozen, so there is
    no step that delayed FP8 scales could follow from."""
    fp8 = replace(config.fp8, recipe="current")
    return replace(config, adapter=Adapter(), model=replace(config.model, eval=True), fp8=fp8)


def _digest(of: Any) -> str:
    return digest_of_bytes(json.dumps(of, sort_keys=True).encode())


def _draft(path: Path, shape: tuple[int, ...]) -> np.memmap:
    """The numbers that are known so far, NaN where they are not: a file's, of process 0."""
    if is_first_process():
        with writing("the reference", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or np.load(path, mmap_mode="r").shape != shape:
                write_file("the reference", path, lambda to: _write_nothing(to, shape))
    popdist.gather("the draft is there")
    if not path.exists():
        raise UserError(f"all processes must see the folder {shown_path(path.parent)}")
    return np.lib.format.open_memmap(path, "r+" if is_first_process() else "c")


def _write_nothing(path: Path, shape: tuple[int, ...]) -> None:
    with path.open("wb") as file:
        np.save(file, np.full(shape, np.nan, np.float32))
    sync(path)


def _write(path: Path, logps: np.ndarray) -> None:
    """Write the numbers of a file; process 0 does."""
    if is_first_process():
        facts = {"sha256": digest(logps)}
        write_file("the reference", path, lambda to: write_shard(to, {_LOGPS: logps}, facts))


def _read(path: Path) -> np.ndarray | None:
    """The numbers of a file; None: there is none, or it is damaged, which is said."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "np") as file:
            logps, metadata = file.get_tensor(_LOGPS), file.metadata() or {}
        if metadata.get("sha256") != digest(logps) or not np.isfinite(logps).all():
            raise FileError("it is damaged")
    except (OSError, SafetensorError, FileError) as error:
        say(f"warning: {shown_path(path)} cannot be used: {error}")
        return None
    return np.asarray(logps)


def _bar(total: int, first: int) -> tqdm:
    return tqdm(
        desc="reference", total=total, initial=first, unit="sample", leave=False,
        disable=not is_first_process() or None, dynamic_ncols=True,
    )  # fmt: skip
