"""Checkpoint manager of a run: decides when to save, and collects the state to save."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import popdist
from checkpoints import CheckpointError
from checkpoints.lazy_arrays import Arrays
from config.sections import RunConfig
from data.loader import Loader
from data.tokenizer import Tokenizer, save_tokenizer
from files.formatting import format_bytes, format_name
from files.run_folder import CONFIG, RunFolder
from files.yaml_files import dump_yaml
from modelling.model_family import get_family
from modelling.weights import total_nbytes
from planning.hardware.memory_check import available_host_bytes
from run.skipped_steps import SkippedSteps
from sessions.training import TrainingSession
from terminal.screen import is_first_process, say

if TYPE_CHECKING:
    from checkpoints.store import CheckpointStore, SaveResult
    from run.best_checkpoint import BestCheckpoint
    from run.checkpoint_mirror import CheckpointMirror

MAX_FAILURES = 2
"""Consecutive failed saves that a run survives: one, and the retry with a later state."""

MAX_COPY = 0.8
"""Largest share of the free host memory for the copy of the state that a background save writes."""

DISK_SHARD_BYTES = 2**27
"""Size of a safetensors file when memory cannot hold the training state, or no copy of it."""


class CheckpointManager:
    """Saves checkpoints at the configured steps, and at the end of a run; needs --save."""

    def __init__(
        self,
        config: RunConfig,
        model: TrainingSession,
        loader: Loader,
        skipped: SkippedSteps,
        best: BestCheckpoint | None,
        initial_step: int,
        tokenizer: Tokenizer | None = None,
        base: Mapping[str, Any] = MappingProxyType({}),
        mirror: CheckpointMirror | None = None,
    ) -> None:
        """Create the manager of a run's checkpoint folder.

        Args:
            best: the best evaluation so far; None: the run does not evaluate.
            initial_step: step that the run starts at, which is already saved.
            tokenizer: tokenizer of the data; copied to the run's folder.
            base: metadata about the weights that are not trained.
            mirror: mirror of the checkpoints, on process 0.
        """
        self._config, self._model = config, model
        self._loader, self._skipped, self._best = loader, skipped, best
        self._tokenizer, self._base, self._has_warned = tokenizer, base, False
        settings = config.checkpoint
        on_disk = config.execution.disk is not None
        self._store: CheckpointStore | None = None
        if settings.save:
            from checkpoints.store import SHARD_BYTES, CheckpointStore

            shard_bytes = DISK_SHARD_BYTES if on_disk else SHARD_BYTES
            self._store = CheckpointStore(settings.save, settings.to_keep, shard_bytes)
        self._in_background = not on_disk
        self._saved_step = initial_step  # the last step that is known to be on disk
        self._pending_step: int | None = None  # the step that is being written
        self._failures = 0  # consecutive saves that could not be written
        self._last_save_time = time.monotonic()  # start of the last save, in seconds
        self._blocked_seconds: dict[int, float] = {}  # that training waited, by saved step
        self._nbytes = 0  # of the tensors of a step
        self._mirror = mirror
        self._reported: SaveResult | None = None  # the last save in `report_last_save`

    @property
    def step(self) -> int:
        """The last step that was saved or is being saved."""
        return self._saved_step if self._pending_step is None else self._pending_step

    def should_save(self, step: int) -> bool:
        """True on process 0 if a save is due by `checkpoint.minutes`, or to retry a failed one."""
        if self._store is None or not is_first_process():
            return False
        if self._store.last_save_failed and not self._failures:
            return True
        minutes = self._config.checkpoint.minutes
        due = minutes is not None and time.monotonic() - self._last_save_time >= 60 * minutes
        failed = self._failures == 1 and self._pending_step is None  # a save in the foreground
        return (due or failed) and step != self.step

    def maybe_save(self, step: int) -> None:
        """Save a checkpoint in the background if `checkpoint.steps` makes one due at this step."""
        every = self._config.checkpoint.steps
        if every is not None and step % every < self._config.execution.device_iterations:
            self.save(step)

    def save(self, step: int) -> None:
        """Save a checkpoint, in the background if the host's memory has room for a copy.

        A failed save does not end the run: it is retried once with the state of that moment, and
        then at the next step that is due.

        Raises:
            CheckpointError: all of these failed; on all processes.
        """
        if self._store is None:
            return
        start = time.monotonic()
        self._await_pending_save()
        try:
            self._save(step, wait=not self._in_background)
        except CheckpointError as error:
            self._on_save_failure(error)
        self._blocked_seconds[step] = time.monotonic() - start

    def report_last_save(self) -> dict[str, float]:
        """Return metrics of the last completed save on process 0, and upload it to the mirror.

        Duration, time that training was blocked, and bytes are returned once for each save.
        """
        saved = None if self._store is None else self._store.last_save
        if saved is None or not is_first_process():
            return {}
        metrics: dict[str, float] = {
            "checkpoint/step": saved.step,
            "checkpoint/time": round(saved.time, 3),
        }
        if saved is not self._reported:
            metrics |= {"checkpoint/seconds": saved.seconds, "checkpoint/bytes": self._nbytes}
            blocked_seconds = self._blocked_seconds.pop(saved.step, saved.seconds)
            metrics["checkpoint/blocked_seconds"] = blocked_seconds
            self._reported = saved
            if self._mirror is not None and saved.path is not None:
                self._mirror.upload(saved.step, saved.path)
        if self._mirror is not None and self._mirror.last_uploaded is not None:
            metrics["checkpoint/mirrored_step"] = self._mirror.last_uploaded
        return metrics

    def save_last(self, step: int) -> bool:
        """Save the last training step of a run unless it is already saved.

        Returns:
            True if `report_last_save` has something new.

        Raises:
            CheckpointError: the step cannot be written.
        """
        if self._store is None:
            return False
        with suppress(CheckpointError):  # this save replaces the one that failed
            self._await_pending_save()
        if self._saved_step != step:
            self._save(step, wait=True)
        return self._store.last_save is not self._reported

    def _save(self, step: int, wait: bool) -> None:
        assert self._store is not None
        self._last_save_time = time.monotonic()
        tensors = self._model.tensors(self._config.checkpoint.save_optimizer, frozen=False)
        texts = {CONFIG: dump_yaml(self._config.to_dict())}
        self._prepare_folder(step, tensors)
        self._nbytes = total_nbytes(tensors)
        wait = wait or not self._has_room_for_copy()
        self._store.save(step, tensors, self._metadata(), wait, texts)
        if wait:
            self._saved_step, self._failures = step, 0
            say(f"saved step {step} in {self._config.checkpoint.save}")
        else:
            self._pending_step = step

    def _has_room_for_copy(self) -> bool:
        """True if all processes have memory for a copy of what they save; collective.

        On machines whose devices share the host's memory, the copy is beside the state itself.
        """
        assert self._store is not None
        free, copied = available_host_bytes(), self._nbytes / popdist.getNumInstances()
        has_room = free is None or copied <= MAX_COPY * free
        if all(popdist.all_gather_object(has_room)):
            return True
        if self._in_background:
            self._in_background, self._store.shard_bytes = False, DISK_SHARD_BYTES
            say(
                f"the host's free memory has no room for a copy of {format_bytes(self._nbytes)}: "
                "training waits until a step is saved"
            )
        return False

    def _await_pending_save(self) -> None:
        """Wait for the background save to end, and handle its error if it failed."""
        step, self._pending_step = self._pending_step, None
        if step is None or self._store is None:
            return
        try:
            self._store.wait()
            self._saved_step, self._failures = step, 0
        except CheckpointError as error:
            self._on_save_failure(error)

    def _on_save_failure(self, error: CheckpointError) -> None:
        """Warn about a failed save, or raise its error after too many failures in a row."""
        self._failures += 1
        if self._failures > MAX_FAILURES:
            raise error
        retry = "now" if self._failures == 1 else "when the next save is due"
        say(f"warning: {error}; the run continues and saves again {retry}")

    @property
    def saved_message(self) -> str:
        """Return a message on where the last complete checkpoint is saved."""
        save = self._config.checkpoint.save
        if self._store is None:
            return "the state before is lost, since --save was not given"
        return f"the state before is saved as step {self._saved_step} in {save}"

    @property
    def resume_message(self) -> str:
        """Return a message on the step from which the run would resume if it ended now."""
        if self._store is None:
            return "no checkpoint was saved, since --save was not given"
        if not self.step:
            return f"no checkpoint was saved yet in {self._config.checkpoint.save}"
        return f"step {self.step} is saved in {self._config.checkpoint.save}, where a run resumes"

    def _metadata(self) -> dict[str, Any]:
        from run.model_weights import MODEL

        return {
            "data": self._loader.state(),
            "skipped_steps": self._skipped.total,
            "best": None if self._best is None else self._best.to_metadata(),
            "config": self._config.to_dict(),
            MODEL: get_family(self._config).to_config_json(self._config),
            "versions": {name: metadata.version(name) for name in ("jax", "numpy", "popxl-xla")},
            **self._base,
        }

    def _prepare_folder(self, step: int | None, tensors: Arrays) -> None:
        """Create the run folder with the tokenizer, and check free disk space; collective.

        Repeated before each save, as the folder can be deleted meanwhile.

        Raises:
            CheckpointError: on all processes, if that fails or the disk has too little free space.
        """

        from checkpoints.collective_io import run_on_first_process

        def prepare_folder() -> None:
            assert self._store is not None
            folder = RunFolder(Path(self._config.checkpoint.save or ""))
            folder.path.mkdir(parents=True, exist_ok=True)
            self._copy_tokenizer(folder)
            self._store.check_disk_space(step, total_nbytes(tensors))

        run_on_first_process(prepare_folder)

    def _copy_tokenizer(self, folder: RunFolder) -> None:
        """Copy the tokenizer's files to the run folder.

        A failure is a warning, once: loading the run then needs the original tokenizer.
        """
        if self._tokenizer is None:
            return
        from run.export_extras import base_generation_config

        try:
            save_tokenizer(self._tokenizer, folder, base_generation_config(self._config))
        except Exception as error:  # libraries raise plain exceptions
            if not self._has_warned:
                name = format_name(str(self._config.data.tokenizer))
                say(
                    f"warning: the tokenizer is not copied to the run's folder, the run continues: "
                    f"{error}; loading the run needs {name}, or another by --tokenizer"
                )
            self._has_warned = True

    def on_train_begin(self) -> None:
        """Print at which steps the run saves, and check free disk space; collective.

        Too little space for all steps that are kept is a warning.

        Raises:
            CheckpointError: the disk has too little free space for one step.
        """
        settings = self._config.checkpoint
        if self._store is None:
            say("no checkpoints will be saved: give --save DIR to be able to resume")
            return
        tensors = self._model.tensors(settings.save_optimizer, frozen=False)
        self._prepare_folder(None, tensors)
        intervals = [f"{settings.steps} steps"] if settings.steps is not None else []
        intervals += [f"{settings.minutes:g} minutes"] if settings.minutes is not None else []
        when = f"every {' and every '.join(intervals)}, and " if intervals else ""
        mirror = f", copied to {settings.mirror}" if settings.mirror else ""
        size = format_bytes(total_nbytes(tensors))
        say(f"saving {when}at the end in {settings.save}{mirror}: {size} each")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._store is not None:
            self._store.close()
        self.report_last_save()  # passes the last step to the mirror
