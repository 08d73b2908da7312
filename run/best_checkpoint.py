"""Best checkpoint of a run: the weights with the best evaluation metric so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints import CheckpointError
from checkpoints.lazy_arrays import Arrays
from config.objectives import METRICS
from config.sections import RunConfig
from files.formatting import format_number, format_path
from files.json_files import JsonObject
from files.run_folder import CONFIG, RunFolder
from files.yaml_files import dump_yaml
from terminal.screen import say


@dataclass
class EarlyStopping:
    """Counts consecutive evaluations without improvement, which end training.

    Attributes:
        patience: number of evaluations without improvement that end training; None: never.
        evals_since_best: number of evaluations since the last improvement.
    """

    patience: int | None
    evals_since_best: int = 0

    def update(self, improved: bool) -> None:
        """Count an evaluation that did or did not improve the metric."""
        self.evals_since_best = 0 if improved else self.evals_since_best + 1

    @property
    def should_stop(self) -> bool:
        return self.patience is not None and self.evals_since_best >= self.patience


class BestCheckpoint:
    """Tracks the best value of an evaluation metric, and saves the weights that reached it.

    With `checkpoint.keep_best`, the weights of the best evaluation are saved, without optimizer
    state, in a folder of their own. NaN is never the best value.
    """

    def __init__(
        self, config: RunConfig, state: Mapping[str, Any] | None, base: Mapping[str, Any]
    ) -> None:
        """Start without a best value, or with that of the resumed checkpoint.

        Args:
            state: `to_metadata()` of the checkpoint that is resumed; None in a new run.
            base: metadata about the weights that are not trained.
        """
        self._config, self._base = config, base
        self._metric = config.checkpoint.keep_best or "loss"
        self._value: float | None = None
        self._step = 0
        self._early_stopping = EarlyStopping(config.eval.patience)
        saved = (
            None if state is None else JsonObject(state, "the best evaluation of the checkpoint")
        )
        if saved is not None and saved.get_text("metric") == self._metric:
            self._value = None if saved.data.get("value") is None else saved.get_number("value")
            self._step = saved.get_count("step")
            self._early_stopping.evals_since_best = saved.get_count("since")
        save = config.checkpoint.save
        keeps_best = save is not None and config.checkpoint.keep_best is not None
        self._folder = RunFolder(Path(save or "")).best_folder if keeps_best else None

    def to_metadata(self) -> dict[str, Any]:
        """Return the best value and early stopping's counter, to store in a checkpoint."""
        return {
            "metric": self._metric,
            "value": self._value,
            "step": self._step,
            "since": self._early_stopping.evals_since_best,
        }

    def on_evaluate(self, step: int, metrics: Mapping[str, float], weights: Arrays) -> None:
        """Update the best value after an evaluation, and save the weights if it improved.

        Args:
            step: number of optimizer steps done.
            weights: the evaluated weights by logical name; read only if they are saved.
        """
        value = metrics.get(self._metric, math.nan)
        improved = self._is_better(value)
        self._early_stopping.update(improved)
        if not improved:
            return
        try:
            self._save(step, metrics, weights)
        except CheckpointError as error:  # a later evaluation can be as good
            say(f"warning: {error}; the run continues, keeping the previous best weights")
            return
        self._value, self._step = value, step

    def _save(self, step: int, metrics: Mapping[str, float], weights: Arrays) -> None:
        if self._folder is not None:
            from checkpoints import CheckpointStore

            with CheckpointStore(self._folder, to_keep=1) as store:
                config = self._config.to_dict()
                metadata = {"metrics": dict(metrics), "config": config, **self._base}
                texts = {CONFIG: dump_yaml(config)}
                store.save(step, weights, metadata, wait=True, texts=texts)

    @property
    def should_stop(self) -> bool:
        """True if early stopping shall end training after the last evaluation."""
        return self._early_stopping.should_stop

    def print_early_stop(self) -> None:
        """Print why early stopping ends training."""
        best = (
            "none" if self._value is None else f"{format_number(self._value)} at step {self._step}"
        )
        say(
            f"{self._early_stopping.evals_since_best} evaluations in a row had no better "
            f"{self._metric} (the best: {best}): training ends"
        )

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self._value is None:
            return True
        return value > self._value if METRICS[self._metric] else value < self._value


def print_best_step(run: str) -> None:
    """Print the best step of a run and how to load it, if the run has a best checkpoint."""
    from checkpoints import has_checkpoint, load_checkpoint

    folder = RunFolder(Path(run)).best_folder
    if not has_checkpoint(run) or not has_checkpoint(folder):
        return
    with suppress(CheckpointError, LookupError, TypeError):  # loading it reports the error
        best = load_checkpoint(folder, verify=False)
        metric = best.metadata["config"]["checkpoint"]["keep_best"]
        say(f"step {best.step} was the best by {metric}: --load {format_path(folder)} takes it")
