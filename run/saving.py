"""The checkpoints of a run: when they are saved, and what is in them."""

from __future__ import annotations

import time
from importlib import metadata
from typing import Any, Self

from checkpoints import CheckpointStore
from checkpoints.store import SHARD_BYTES
from config.sections import RunConfig
from data.batches import Loader
from files.run_folder import CONFIG
from files.shown import shown_bytes
from files.yaml_files import yaml_text
from modelling.spec import ModelFamily
from modelling.weights import Arrays, nbytes_of
from run.best import Best
from run.skipped_steps import SkippedSteps
from run.start import MODEL
from sessions.training import FineTuning
from terminal.screen import is_first_process, say

SHARD_OF_DISK = 2**27
"""Bytes of a safetensors file that is made in memory, where memory cannot hold the state."""


class Checkpoints:
    """Saves as `checkpoint` says, and at the end. Does nothing without `checkpoint.save`."""

    def __init__(
        self,
        config: RunConfig,
        family: ModelFamily,
        model: FineTuning,
        loader: Loader,
        skipped: SkippedSteps,
        best: Best,
        saved: int,
    ) -> None:
        """Args: `saved`: step that the run starts at, which need not be saved again."""
        self._config, self._family, self._model = config, family, model
        self._loader, self._skipped, self._best = loader, skipped, best
        settings = config.checkpoint
        on_disk = config.execution.disk is not None
        size = SHARD_OF_DISK if on_disk else SHARD_BYTES
        self._store = (
            CheckpointStore(settings.save, settings.to_keep, size) if settings.save else None
        )
        self._copies = not on_disk  # memory has no room for a second copy then
        self.step: int = saved  # the last one saved
        self._last = time.monotonic()  # seconds, when that was

    def is_due(self, step: int) -> bool:
        """Whether it is time for a save, as `checkpoint.minutes` says, by process 0's clock."""
        minutes = self._config.checkpoint.minutes
        due = minutes is not None and time.monotonic() - self._last >= 60 * minutes
        return due and step != self.step and is_first_process() and self._store is not None

    def after(self, step: int) -> None:
        """Save if `checkpoint.steps` says so; the loop goes on meanwhile."""
        every = self._config.checkpoint.steps
        if every is not None and step % every < self._config.execution.device_iterations:
            self.save(step)

    def save(self, step: int) -> None:
        """Save; the loop goes on meanwhile, unless the state is larger than memory."""
        self._save(step, wait=not self._copies)

    def finish(self, step: int) -> None:
        """Save the last step, if it is not saved yet."""
        if self.step != step:
            self._save(step, wait=True)

    def _save(self, step: int, wait: bool) -> None:
        if self._store is None:
            return
        tensors = self._model.tensors(self._config.checkpoint.save_optimizer)
        texts = {CONFIG: yaml_text(self._config.to_dict())}
        self._check_space(step, tensors)
        self._store.save(step, tensors, self._metadata(), wait, texts)
        self.step, self._last = step, time.monotonic()
        if wait:
            say(f"saved step {step} in {self._config.checkpoint.save}")

    @property
    def kept(self) -> str:
        """Where the state of the last step is, for people."""
        if self._store is None:
            return "the state before is lost, since --save was not given"
        return f"the state before is saved as step {self.step} in {self._config.checkpoint.save}"

    def _metadata(self) -> dict[str, Any]:
        return {
            "data": self._loader.state(),
            "skipped_steps": self._skipped.total,
            "best": self._best.state(),
            "config": self._config.to_dict(),
            MODEL: self._family.to_config_json(self._config),
            "versions": {name: metadata.version(name) for name in ("jax", "numpy", "popxl-xla")},
        }

    def _check_space(self, step: int, tensors: Arrays) -> None:
        """Raise CheckpointError if the disk has no room for a step. Process 0 looks."""
        if is_first_process() and self._store is not None:
            self._store.check_space(step, nbytes_of(tensors))

    def begin(self) -> None:
        """Before the first step: say when the run is saved, and check that the disk has room.

        Raises:
            CheckpointError: it has none for a step. Less than for all that are kept is a warning.
        """
        settings = self._config.checkpoint
        if self._store is None:
            say("no checkpoints are saved, so that nothing can be continued: --save DIR keeps them")
            return
        if not is_first_process():
            return
        needed = nbytes_of(self._model.tensors(settings.save_optimizer))
        self._store.check_space(None, needed)
        every = [f"{settings.steps} steps"] if settings.steps is not None else []
        every += [f"{settings.minutes:g} minutes"] if settings.minutes is not None else []
        when = f"every {' and every '.join(every)}, and " if every else ""
        say(f"saving {when}at the end in {settings.save}: {shown_bytes(needed)} each")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._store is not None:
            self._store.close()
