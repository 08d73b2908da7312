"""The best evaluation so far: keeps its weights, and ends training when none is better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from checkpoints import CheckpointError, CheckpointStore, has_checkpoint, load_checkpoint
from checkpoints.arrays import Arrays
from config.metrics import METRICS
from config.sections import RunConfig
from files.formatting import format_number, format_path
from files.json_files import JsonObject
from files.run_folder import CONFIG, RunFolder
from files.yaml_files import dump_yaml
from terminal.screen import say

NO_BASE: Mapping[str, Any] = MappingProxyType({})
"""All weights are trained."""


class Best:
    """Watches one metric: `checkpoint.keep_best`, else the loss.

    With `checkpoint.keep_best`, the weights of the best evaluation are kept as a checkpoint without
    optimizer state, in a folder of their own. NaN is never the best.
    """

    def __init__(
        self, config: RunConfig, state: Mapping[str, Any] | None, base: Mapping[str, Any] = NO_BASE
    ) -> None:
        """
        Args:
            state: what `state()` gave when the run was saved.
            base: what to save of the weights that are not trained.
        """
        self._config, self._base = config, base
        self._metric = config.checkpoint.keep_best or "loss"
        self._value: float | None = None
        self._step = self._since = 0
        saved = (
            None if state is None else JsonObject(state, "the best evaluation of the checkpoint")
        )
        if saved is not None and saved.text("metric") == self._metric:
            self._value = None if saved.data.get("value") is None else saved.number("value")
            self._step, self._since = saved.count("step"), saved.count("since")
        save = config.checkpoint.save
        kept = save is not None and config.checkpoint.keep_best is not None
        self._folder = RunFolder(Path(save or "")).best if kept else None

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores, so that a continued run keeps watching."""
        return {
            "metric": self._metric,
            "value": self._value,
            "step": self._step,
            "since": self._since,
        }

    def consider(self, step: int, metrics: Mapping[str, float], weights: Arrays) -> None:
        """Take an evaluation into account.

        Args:
            step: optimizer steps done.
            weights: those that were evaluated, read only if they are kept.
        """
        value = metrics.get(self._metric, math.nan)
        if not self._is_better(value):
            self._since += 1
            return
        self._since = 0
        try:
            self._keep(step, metrics, weights)
        except CheckpointError as error:  # an evaluation as good as this may come again
            say(f"warning: {error}; the run goes on, and the best weights stay those before")
            return
        self._value, self._step = value, step

    def _keep(self, step: int, metrics: Mapping[str, float], weights: Arrays) -> None:
        if self._folder is not None:
            with CheckpointStore(self._folder, to_keep=1) as store:
                facts = {"metrics": dict(metrics), "config": self._config.to_dict()}
                facts |= self._base
                texts = {CONFIG: dump_yaml(self._config.to_dict())}
                store.save(step, weights, facts, wait=True, texts=texts)

    @property
    def is_over(self) -> bool:
        """Whether the last `eval.patience` evaluations brought no better one."""
        patience = self._config.eval.patience
        return patience is not None and self._since >= patience

    def say_over(self) -> None:
        """Say why training ends."""
        best = (
            "none" if self._value is None else f"{format_number(self._value)} at step {self._step}"
        )
        say(
            f"{self._since} evaluations in a row had no better {self._metric} (the best: {best}): "
            "training ends"
        )

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self._value is None:
            return True
        return value > self._value if METRICS[self._metric] else value < self._value


def say_best(run: str) -> None:
    """Say which step of a run was the best and how to load it, if the run keeps it."""
    folder = RunFolder(Path(run)).best
    if not has_checkpoint(run) or not has_checkpoint(folder):
        return
    with suppress(CheckpointError, LookupError, TypeError):  # who loads it says what is wrong
        best = load_checkpoint(folder, verify=False)
        metric = best.metadata["config"]["checkpoint"]["keep_best"]
        say(f"step {best.step} was the best by {metric}: --load {format_path(folder)} takes it")
