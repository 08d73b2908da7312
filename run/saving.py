"""The checkpoints of a run: when they are saved, and what is in them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from checkpoints import CheckpointError, CheckpointStore
from checkpoints.arrays import Arrays
from checkpoints.collective_io import on_first_process
from checkpoints.store import SHARD_BYTES, Saved
from config.sections import RunConfig
from data.loader import Loader
from data.tokenizer import Tokenizer, save_tokenizer
from files.formatting import format_bytes, format_name
from files.run_folder import CONFIG, RunFolder
from files.yaml_files import dump_yaml
from modelling.spec import get_family
from modelling.weights import total_nbytes
from run.best import NO_BASE, Best
from run.export_extras import base_settings
from run.mirror import Mirror
from run.model_weights import MODEL
from run.skipped_steps import SkippedSteps
from sessions.training import TrainingSession
from terminal.screen import is_first_process, say

MAX_FAILURES = 2
"""Saves in a row that may fail: one, and that of a later state in its place. The next failure ends
the run."""

SHARD_OF_DISK = 2**27
"""Bytes of a safetensors file that is made in memory, where memory cannot hold the state."""


class Checkpoints:
    """Saves as `checkpoint` says, and at the end. Does nothing without `checkpoint.save`."""

    def __init__(
        self,
        config: RunConfig,
        model: TrainingSession,
        loader: Loader,
        skipped: SkippedSteps,
        best: Best,
        saved: int,
        tokenizer: Tokenizer | None = None,
        base: Mapping[str, Any] = NO_BASE,
        mirror: Mirror | None = None,
    ) -> None:
        """
        Args:
            saved: step that the run starts at, which need not be saved again.
            base: what to save of the weights that are not trained.
            mirror: what copies the steps, on process 0.
            tokenizer: of the data; kept next to the steps.
        """
        self._config, self._model = config, model
        self._loader, self._skipped, self._best = loader, skipped, best
        self._tokenizer, self._base, self._has_warned = tokenizer, base, False
        settings = config.checkpoint
        on_disk = config.execution.disk is not None
        size = SHARD_OF_DISK if on_disk else SHARD_BYTES
        self._store = (
            CheckpointStore(settings.save, settings.to_keep, size) if settings.save else None
        )
        self._copies = not on_disk  # memory has no room for a second copy then
        self._saved = saved  # the last step that is known to be on disk
        self._pending: int | None = None  # the one that is being written
        self._failures = 0  # saves in a row that could not be written
        self._last = time.monotonic()  # seconds, when the last one began
        self._stalls: dict[int, float] = {}  # seconds that training waited for the save of a step
        self._bytes = 0  # of the tensors of a step
        self._mirror = mirror
        self._told: Saved | None = None  # the last save that `facts` has told of

    @property
    def step(self) -> int:
        """The last step that was saved, or is being saved."""
        return self._saved if self._pending is None else self._pending

    def is_due(self, step: int) -> bool:
        """Whether it is time for a save, as `checkpoint.minutes` says, by process 0's clock."""
        if self._store is None or not is_first_process():
            return False
        if self._store.has_failed and not self._failures:
            return True
        minutes = self._config.checkpoint.minutes
        due = minutes is not None and time.monotonic() - self._last >= 60 * minutes
        failed = self._failures == 1 and self._pending is None  # as one of a state on disk does
        return (due or failed) and step != self.step

    def after(self, step: int) -> None:
        """Save if `checkpoint.steps` says so; the loop goes on meanwhile."""
        every = self._config.checkpoint.steps
        if every is not None and step % every < self._config.execution.device_iterations:
            self.save(step)

    def save(self, step: int) -> None:
        """Save; the loop goes on meanwhile, unless the state is larger than memory.

        A save that fails does not end the run: one of the state of then follows as soon as that is
        known, and the next one when it is due.

        Raises:
            CheckpointError: all of these failed. The outcome of a save is the same for all
                processes.
        """
        if self._store is None:
            return
        begun = time.monotonic()
        self._collect()
        try:
            self._save(step, wait=not self._copies)
        except CheckpointError as error:
            self._lose(error)
        self._stalls[step] = time.monotonic() - begun

    def facts(self) -> dict[str, float]:
        """What process 0 records of saves with a step: the last one that is on disk, when it was
        complete and, once, how long it took, how long training waited for it, and its bytes.

        What is new is handed to the mirror.
        """
        saved = None if self._store is None else self._store.saved
        if saved is None or not is_first_process():
            return {}
        facts: dict[str, float] = {
            "checkpoint/step": saved.step,
            "checkpoint/time": round(saved.time, 3),
        }
        if saved is not self._told:
            facts |= {"checkpoint/seconds": saved.seconds, "checkpoint/bytes": self._bytes}
            facts["checkpoint/blocked_seconds"] = self._stalls.pop(saved.step, saved.seconds)
            self._told = saved
            if self._mirror is not None and saved.path is not None:
                self._mirror.add(saved.step, saved.path)
        if self._mirror is not None and self._mirror.step is not None:
            facts["checkpoint/mirrored_step"] = self._mirror.step
        return facts

    def finish(self, step: int) -> bool:
        """Save the last step, if it is not saved yet.

        Returns:
            Whether `facts` has something new.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self._store is None:
            return False
        with suppress(CheckpointError):  # this save takes the place of the one that failed
            self._collect()
        if self._saved != step:
            self._save(step, wait=True)
        return self._store.saved is not self._told

    def _save(self, step: int, wait: bool) -> None:
        assert self._store is not None
        self._last = time.monotonic()
        tensors = self._model.tensors(self._config.checkpoint.save_optimizer, frozen=False)
        texts = {CONFIG: dump_yaml(self._config.to_dict())}
        self._prepare(step, tensors)
        self._bytes = total_nbytes(tensors)
        self._store.save(step, tensors, self._metadata(), wait, texts)
        if wait:
            self._saved, self._failures = step, 0
            say(f"saved step {step} in {self._config.checkpoint.save}")
        else:
            self._pending = step

    def _collect(self) -> None:
        """Learn how the save in the background ended."""
        step, self._pending = self._pending, None
        if step is None or self._store is None:
            return
        try:
            self._store.wait()
            self._saved, self._failures = step, 0
        except CheckpointError as error:
            self._lose(error)

    def _lose(self, error: CheckpointError) -> None:
        """Go on without a save, unless too many in a row have failed."""
        self._failures += 1
        if self._failures > MAX_FAILURES:
            raise error
        when = "of the state of now" if self._failures == 1 else "when the next one is due"
        say(f"warning: {error}; the run goes on, with a save {when}")

    @property
    def kept(self) -> str:
        """Where the state of the last step is, for people."""
        if self._store is None:
            return "the state before is lost, since --save was not given"
        return f"the state before is saved as step {self._saved} in {self._config.checkpoint.save}"

    @property
    def resumable(self) -> str:
        """Where the run can be resumed if it stops now, for people."""
        if self._store is None:
            return "no checkpoint was saved, since --save was not given"
        if not self.step:
            return f"no checkpoint was saved yet in {self._config.checkpoint.save}"
        return f"step {self.step} is saved in {self._config.checkpoint.save}, where a run resumes"

    def _metadata(self) -> dict[str, Any]:
        return {
            "data": self._loader.state(),
            "skipped_steps": self._skipped.total,
            "best": self._best.state(),
            "config": self._config.to_dict(),
            MODEL: get_family(self._config).to_config_json(self._config),
            "versions": {name: metadata.version(name) for name in ("jax", "numpy", "popxl-xla")},
            **self._base,
        }

    def _prepare(self, step: int | None, tensors: Arrays) -> None:
        """Make the folder and keep the tokenizer there, also if somebody has deleted them since the
        last save; process 0 does.

        Raises:
            CheckpointError: on all processes, if that fails or the disk has no room.
        """

        def prepare() -> None:
            assert self._store is not None
            folder = RunFolder(Path(self._config.checkpoint.save or ""))
            folder.path.mkdir(parents=True, exist_ok=True)
            self._keep_tokenizer(folder)
            self._store.check_space(step, total_nbytes(tensors))

        on_first_process(prepare)

    def _keep_tokenizer(self, folder: RunFolder) -> None:
        """Copy the tokenizer to the run's folder. Without the copy, who loads the run needs the
        original: a convenience, whose failure is told once and ends nothing."""
        if self._tokenizer is None:
            return
        try:
            save_tokenizer(self._tokenizer, folder, base_settings(self._config))
        except Exception as error:  # libraries raise plain exceptions
            if not self._has_warned:
                name = format_name(str(self._config.data.tokenizer))
                say(
                    f"warning: the tokenizer is not copied to the run's folder, the run goes on: "
                    f"{error}; what loads the run needs {name}, or another by --tokenizer"
                )
            self._has_warned = True

    def begin(self) -> None:
        """Before the first step: say when the run is saved, and check that the disk has room.

        Raises:
            CheckpointError: it has none for a step. Less than for all that are kept is a warning.
        """
        settings = self._config.checkpoint
        if self._store is None:
            say("no checkpoints are saved, so that nothing can be continued: --save DIR keeps them")
            return
        tensors = self._model.tensors(settings.save_optimizer, frozen=False)
        self._prepare(None, tensors)
        every = [f"{settings.steps} steps"] if settings.steps is not None else []
        every += [f"{settings.minutes:g} minutes"] if settings.minutes is not None else []
        when = f"every {' and every '.join(every)}, and " if every else ""
        to = f"{settings.save}, copied to {settings.mirror}" if settings.mirror else settings.save
        say(f"saving {when}at the end in {to}: {format_bytes(total_nbytes(tensors))} each")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._store is not None:
            self._store.close()
        self.facts()  # which hands the mirror the last step
