"""Outputs of a frozen model over a run's samples, computed once in a streamed pass and cached.

The model is the reference of preference training or a teacher. The name of a cache file is a digest
of all that its content depends on: weights, settings and samples. A file that is being computed is
a draft, which the same command resumes (`run.frozen_outputs_file`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import popdist
from checkpoints.safetensors_files import sha256_of_bytes
from config.errors import UserError
from config.sections import RunConfig
from data.samples import Samples
from data.token_outputs import (
    TEACHER_STATES,
    loss_tokens_per_sample,
    select_loss_tokens,
    top_tokens_dtype,
    top_tokens_rows,
)
from files.atomic_writing import write_file_atomically
from files.errors import WriteError
from files.formatting import format_bytes, format_path
from modelling.objectives import HiddenStates, Objective, TokenLogps, TopTokens
from modelling.phases.teacher_head import TeacherHead
from run.frozen_outputs_file import COMPLETE, DRAFT, OutputsFile, read_complete_file
from sessions.loss_evaluation import LossSession
from sessions.session import compile_session
from terminal.screen import is_first_process, progress_bar, say

MAX_BYTES_IN_MEMORY = 2**28
"""Size of outputs that may be held in memory where the disk has no room."""


class OutputsSource(Protocol):
    """Interface of the frozen model that an objective needs: a reference or a teacher."""

    @property
    def teacher_head(self) -> TeacherHead | None:
        """The head that a program holds besides its own; None if it needs none."""
        ...

    def extend_samples(self, samples: Samples) -> Samples:
        """Add the model's outputs, cached or computed, to samples; collective."""
        ...

    def remove_drafts(self) -> None:
        """Delete unfinished files of outputs that no process is writing."""
        ...


@dataclass(frozen=True)
class OutputKind:
    """A kind of output of a frozen model.

    Attributes:
        name: distinguishes cache files of the same model and samples.
        dtype: of a row, with names.
        rows_per_sample: int64 [n], the rows of each sample.
        to_rows: converts statistics of samples, float32 (n, ...), to rows; takes these, and the
            batch of the samples.
        objective: computes the statistics; None: that of the model's config.
    """

    name: str
    dtype: np.dtype
    rows_per_sample: Callable[[Samples], np.ndarray]
    to_rows: Callable[[np.ndarray, Mapping[str, np.ndarray]], np.ndarray]
    objective: Objective | None = None


@dataclass(frozen=True)
class FrozenModel:
    """A frozen model, whose outputs over samples are computed once.

    Attributes:
        purpose: what it is for, such as "the reference".
        config: its configuration, in evaluation mode.
        sha256: digest of its weights.
        weights: returns them; raises UserError if they are no longer available.
        folder: folder of the cache files.
        previous_folder: that of the run which this one resumes, if it is another folder.
    """

    purpose: str
    config: RunConfig
    sha256: str
    weights: Callable[[], Mapping[str, np.ndarray]]
    folder: Path
    previous_folder: Path | None = None

    def outputs(self, samples: Samples, kind: OutputKind) -> OutputsFile:
        """Returns the rows of all samples, cached or computed; collective.

        Raises:
            UserError: they are in no file, and the weights are no longer available.
        """
        path = self.folder / f"{self._digest(samples, kind)}{COMPLETE}"
        offsets = np.cumsum([0, *kind.rows_per_sample(samples)])
        places = [
            path,
            *([] if self.previous_folder is None else [self.previous_folder / path.name]),
        ]
        for place in places:
            file = read_complete_file(place, offsets, kind.dtype, self.purpose)
            if all(popdist.all_gather_object(file is not None)) and file is not None:
                if place != path and is_first_process():
                    self._copy(place, path)
                return file
        return self._compute(samples, kind, path, offsets)

    def _digest(self, samples: Samples, kind: OutputKind) -> str:
        config = self.config
        settings = {**config.model.to_dict(), "dropout_prob": None, "eval": None}
        if config.fp8.enabled:
            settings["fp8"] = config.fp8.to_dict()
        data = [self.sha256, kind.name, config.family, settings, samples.digest, len(samples)]
        return json_sha256(data)

    def _copy(self, source: Path, target: Path) -> None:
        try:
            write_file_atomically(self.purpose, target, lambda to: shutil.copyfile(source, to))
        except WriteError as error:
            say(f"warning: {error}; the next start reads it where it was")

    def _compute(
        self, samples: Samples, kind: OutputKind, path: Path, offsets: np.ndarray
    ) -> OutputsFile:
        args = offsets, kind.dtype, self.purpose
        with ExitStack() as on_error:
            file = OutputsFile(path.with_suffix(DRAFT), *args, writes=is_first_process())
            on_error.enter_context(file)
            first = min(popdist.all_gather_object(file.num_samples))
            file.truncate(first)
            if first < len(samples):
                nbytes = int(offsets[-1] - offsets[first]) * kind.dtype.itemsize
                say(
                    f"{self.purpose}: {len(samples) - first} of {len(samples)} samples to "
                    f"compute, {format_bytes(nbytes)} in {format_path(self.folder)}"
                )
                self._check_free_space(nbytes)
                self._append_missing(file, samples, kind)
            file.publish()
            popdist.all_gather_object("the file is complete")
            on_error.pop_all()
        if not file.all_rows_on_disk:  # this process did not write it
            published = read_complete_file(path, *args) if not is_first_process() else None
            file = file if published is None else published
        return file

    def _check_free_space(self, nbytes: int) -> None:
        """Raise UserError if outputs that memory should not hold do not fit on the disk."""
        existing = next(p for p in (self.folder.absolute(), *self.folder.absolute().parents)
                        if p.exists())  # fmt: skip
        free = shutil.disk_usage(existing).free
        if nbytes > max(free, MAX_BYTES_IN_MEMORY):
            raise UserError(
                f"{self.purpose} needs {format_bytes(nbytes)} in {format_path(self.folder)}, where "
                f"{format_bytes(free)} are free: make room there, or name another folder"
            )

    def _append_missing(self, file: OutputsFile, samples: Samples, kind: OutputKind) -> None:
        weights = self.weights()
        model = compile_session(
            lambda: LossSession(self.config, objective=kind.objective),
            f"the program of {self.purpose}",
        )
        model.write(weights)
        first = file.num_samples
        bar = progress_bar(self.purpose.removeprefix("the "), len(samples), "sample", first)
        with model, bar:
            for batch, stats in model.loss_stats(samples, first):
                rows = kind.to_rows(stats, samples.take(np.arange(batch.start, batch.stop)))
                if not all(np.isfinite(rows[name]).all() for name in kind.dtype.names or ()):
                    file.remove()  # every process has all values
                    raise UserError(
                        f"a value of {self.purpose} is not finite: its weights cannot be used"
                    )
                file.append(rows, batch.stop - batch.start)
                bar.update(batch.stop - batch.start)


def token_logps_kind(name: str, temperature: float = 1.0) -> OutputKind:
    """Returns the kind of the log-probabilities of all loss tokens.

    Args:
        name: of the array of a batch that has them, see `SamplesWithTokenOutputs`.
        temperature: divides the logits.
    """
    dtype = np.dtype([(name, "<f4")])
    return OutputKind(
        "token_logps" if temperature == 1 else f"token_logps at temperature {temperature}",
        dtype,
        rows_per_sample=loss_tokens_per_sample,
        to_rows=lambda stats, batch: to_structured_rows(select_loss_tokens(stats, batch), dtype),
        objective=TokenLogps(temperature),
    )


def hidden_states_kind(dtype: np.dtype) -> OutputKind:
    """Returns the kind of the last hidden states of all loss tokens; `dtype` is that of a row."""

    def to_rows(stats: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        states = select_loss_tokens(stats, batch)
        rows = np.empty(len(states), dtype)
        rows[TEACHER_STATES] = states
        return rows

    name = f"hidden states in {dtype[TEACHER_STATES].base}"
    return OutputKind(name, dtype, loss_tokens_per_sample, to_rows, HiddenStates())


def top_tokens_kind(k: int, temperature: float, vocab_size: int) -> OutputKind:
    """Returns the kind of the likeliest tokens at all loss tokens; arguments as of `TopTokens`."""
    return OutputKind(
        f"top {k} of {vocab_size}, rest at {temperature}",
        top_tokens_dtype(k),
        rows_per_sample=loss_tokens_per_sample,
        to_rows=lambda stats, batch: top_tokens_rows(select_loss_tokens(stats, batch), k),
        objective=TopTokens(k, temperature, vocab_size),
    )


def to_structured_rows(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns float32 values as rows of a dtype whose fields are all float32."""
    return np.ascontiguousarray(values, np.float32).reshape(-1).view(dtype)


def json_sha256(data: Any) -> str:
    """Returns the SHA-256 hash of JSON values."""
    return sha256_of_bytes(json.dumps(data, sort_keys=True).encode())
