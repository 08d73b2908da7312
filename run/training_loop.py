"""Training loop of a fine-tuning run, with its data, model, metrics and checkpoints."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import popdist
import popxl
from checkpoints.errors import CheckpointError
from checkpoints.lazy_arrays import ArraysView
from config.errors import ConfigError, UserError
from config.process_checks import check_same_on_all_processes, check_same_run_on_all_processes
from config.sections import RunConfig
from data.data_cache import DataCache
from data.loader import Loader
from data.pipeline import Pipeline
from data.samples import Samples
from files.atomic_writing import check_can_write_folder
from files.folder_lock import lock_folder
from files.formatting import format_path
from files.run_folder import RunFolder
from modelling.model_family import get_family
from modelling.weights import WeightMap, without_optimizer_state
from planning.hardware.announce_devices import announce_devices, describe_devices
from planning.hardware.memory_check import check_lower_bound
from run.checkpoint_manager import CheckpointManager
from run.initial_state import InitialState, random_initial_state
from run.learning_rate import LRSchedule, check_steps_divisible, lr_change_message, resolve_epochs
from run.options import RunOptions
from run.records.metrics_jsonl import SAMPLES
from run.records.metrics_logger import MetricsLogger, check_records
from run.records.progress import EVAL_PREFIX
from run.records.throughput import mfu_inputs
from run.skipped_steps import SkippedSteps
from run.startup_warnings import data_warnings, length_warnings, trained_weights_summary
from run.stop_signal import StopSignal
from run.watchdog import Watchdog
from sessions.session import compile_session
from sessions.training import TrainingSession
from terminal.interrupts import Interrupted
from terminal.screen import is_first_process, say, supports_color, tolerate_broken_streams

if TYPE_CHECKING:
    from run.base_model_ref import BaseModelRef
    from run.best_checkpoint import BestCheckpoint
    from run.checkpoint_mirror import CheckpointMirror
    from run.evaluation.evaluator import Evaluator
    from run.frozen_outputs import OutputsSource
    from run.initial_model import InitialModel
    from run.profiler import Profiler


def finetune(config: RunConfig, options: RunOptions, data_cache: DataCache | None = None) -> None:
    """Fine-tune a model; metric loggers that fail do not stop the run.

    Args:
        data_cache: data that was loaded to resolve the config.

    Raises:
        UserError: an error that a user can fix; saved checkpoints stay intact.
        Interrupted: a signal stopped the run before its last step; the state is saved.
    """
    with tolerate_broken_streams():
        stop_reason = _finetune_locked(config, options, data_cache or DataCache())
    if stop_reason is not None:
        raise stop_reason


def _finetune_locked(
    config: RunConfig, options: RunOptions, data_cache: DataCache
) -> Interrupted | None:
    """Fine-tune a model while holding the locks of the run's folders."""
    check_same_run_on_all_processes(
        config, **{"--overwrite": options.overwrite, "--profile": options.profile}
    )
    path = RunFolder.from_options(options.run_dir, config.checkpoint.save, options.name).path
    folder = RunFolder(
        Path(popdist.all_gather_object(str(path))[0])
    )  # a new folder is named by the current time
    _check_before_start(config, options, folder)
    announce_devices(config)
    settings, mirror = config.checkpoint, None
    with ExitStack() as stack:
        folders = {folder.path, Path(config.checkpoint.save or folder.path)}
        for one in folders if is_first_process() else ():
            stack.enter_context(lock_folder(one))
        popdist.all_gather_object("the folders are this run's")
        if settings.save is not None:
            from checkpoints.collective_io import check_shared_folder
            from run.checkpoint_mirror import open_mirror

            save = Path(settings.save)
            check_shared_folder(save)
            mirror = open_mirror(settings.mirror, settings.to_keep, save, options.overwrite)
        if mirror is not None:
            stack.enter_context(mirror)
        stop_reason = _set_up_and_train(config, options, folder, data_cache, mirror)
    if mirror is None or mirror.failure_message is None:
        return stop_reason
    if stop_reason is None:
        raise CheckpointError(mirror.failure_message)
    return Interrupted(stop_reason.number, f"{stop_reason}; {mirror.failure_message}")


def _check_before_start(config: RunConfig, options: RunOptions, folder: RunFolder) -> None:
    """Check configuration and folders before models or data are loaded."""
    if config.model.eval:
        raise ConfigError("model.eval is true, which disables training: set it to false")
    check_steps_divisible(config)
    if options.wandb and is_first_process():
        from terminal.wandb_environment import check_wandb

        check_wandb()
    if options.metrics_port is not None and is_first_process():
        from run.records.prometheus_page import PrometheusPage

        PrometheusPage(options.metrics_host, options.metrics_port).close()
    check_records(folder)
    if config.checkpoint.save is not None:
        check_can_write_folder("checkpoints to", config.checkpoint.save)
        check_can_write_folder(
            "the best weights to", RunFolder(Path(config.checkpoint.save)).best_folder
        )
    if options.save_hf is not None:
        _check_export(options.save_hf, folder.path, config.checkpoint.save)
    check_lower_bound(config)


def _check_export(folder: str, path: Path, save: str | None) -> None:
    from huggingface.model_folders import check_can_write_folder_to

    check_can_write_folder_to(folder)
    if os.path.realpath(folder) in {os.path.realpath(used) for used in (path, save) if used}:
        raise ConfigError(
            f"--save-hf {format_path(folder)} is the folder of the run, which is not empty at "
            "the end: give another one"
        )


def _set_up_and_train(
    config: RunConfig,
    options: RunOptions,
    folder: RunFolder,
    data_cache: DataCache,
    mirror: CheckpointMirror | None,
) -> Interrupted | None:
    """Set up a run and train; returns the signal that stopped training, if any."""
    family = get_family(config)
    data = Pipeline(config, family.sample_format, data_cache)
    if config.eval.steps is not None:
        from run.evaluation.evaluator import resolve_metrics

        resolve_metrics(config, data.task)
    samples = data.make_training_samples()
    loader = Loader.from_config(config, samples)
    if options.preview:
        _print_preview(options.preview, samples, loader, data)
    weight_map = family.weight_map(data.config)
    notes = data_warnings(data.config, samples), trained_weights_summary(data.config, weight_map)
    for note in chain(length_warnings(data.config), *notes):
        say(note)
    start = _resolve_initial_state(data.config, weight_map, options)
    config = _restore_data_and_steps(data.config, options, loader, start)
    initial = {"step to start from": start.step, "digest of the state to start from": start.sha256}
    check_same_on_all_processes({"training.steps": config.training.steps, **initial})
    if start.step >= config.training.steps:
        start, _ = start.load_with_fallback(_verify_checkpoint)
        config = _restore_data_and_steps(data.config, options, loader, start)
        if start.step >= config.training.steps:
            _end_completed_run(config, options, start, folder, data_cache)
            return None
    run_folder = RunFolder(Path(config.checkpoint.save or folder.path))
    frozen, initial_models = _frozen_outputs(config, start, run_folder, data)
    if frozen is not None:
        loader = Loader.from_config(config, frozen.extend_samples(samples))
        _restore_data_and_steps(data.config, options, loader, start)
    base_folders = _keep_base_models(config, start, initial_models, run_folder)
    _warn_unmirrored_bases(config, start, initial_models)
    _print_profile_plan(config, options, start)
    model = _compile_model(config, frozen)
    evaluator = _create_evaluator(config, model, data_cache, frozen)
    if frozen is not None:
        frozen.remove_drafts()
    data_cache.drop_corpus("validation")
    with ExitStack() as stack:
        loaded, _ = start.load_with_fallback(partial(_enter_session, stack, model))
        if loaded is not start:
            start = loaded
            base_folders = _keep_base_models(config, start, initial_models, run_folder)
        config = _restore_data_and_steps(data.config, options, loader, start)
        say(f"starting from {start.source}")
        _print_lr_change(config, start)
        save = config.checkpoint.save is not None
        base = _base_metadata(config, start, initial_models) if save else {}
        best = _create_best_checkpoint(config, start, base)
        skipped = SkippedSteps(config.training.max_skipped_steps, start.skipped_steps)
        checkpoints = CheckpointManager(
            config, model, loader, skipped, best, start.step, data.tokenizer, base, mirror
        )
        if options.overwrite and save and is_first_process():
            from checkpoints.step_folders import remove_run_files
            from run.base_model_ref import remove_unused_base_steps

            remove_run_files(run_folder)
            remove_unused_base_steps(run_folder, base_folders)
            if mirror is not None:
                mirror.delete()
        run = _TrainingRun(
            config, options, loader, start, model, evaluator, best, skipped, checkpoints, folder,
            data_cache,
        )  # fmt: skip
        stop_reason = run.train()
        if mirror is not None:
            mirror.got_signal = stop_reason is not None
        return stop_reason


def _resolve_initial_state(
    config: RunConfig, weight_map: WeightMap, options: RunOptions
) -> InitialState:
    if (start := random_initial_state(config, weight_map)) is not None:
        return start
    from run.resume import resolve_initial_state

    return resolve_initial_state(config, weight_map, options.overwrite)


def _base_metadata(
    config: RunConfig, start: InitialState, initial_models: Sequence[InitialModel]
) -> dict[str, Any]:
    """Return checkpoint metadata on the models whose weights the checkpoints do not contain."""
    from run.resume import base_model_metadata

    base = base_model_metadata(start, get_family(config).weight_map(config))
    for initial_model in initial_models:
        base |= initial_model.to_metadata()
    return base


def _print_profile_plan(config: RunConfig, options: RunOptions, start: InitialState) -> None:
    """Print that the run ends after `--profile`, if it does."""
    if options.profile is None:
        return
    from run.profiler import print_profile_plan

    print_profile_plan(config, options, start.step)


def _frozen_outputs(
    config: RunConfig, start: InitialState, run_folder: RunFolder, data: Pipeline
) -> tuple[OutputsSource | None, Sequence[InitialModel]]:
    """Return the outputs of frozen models that the objective needs, if any.

    The second value is the models among them that the run starts from.
    """
    if config.training.objective == "distill":
        from run.teacher import Teacher

        return Teacher.for_run(config, run_folder, data, _previous_run(start)), ()
    if config.training.row_type is not None:
        from run.initial_model_logps import initial_model_logps_for_run

        logps = initial_model_logps_for_run(config, start, run_folder)
        return logps, () if logps is None else logps.initial_models
    return None, ()


def _print_preview(count: int, samples: Samples, loader: Loader, data: Pipeline) -> None:
    """Print the first samples that the run trains on, token by token."""
    from data.preview import format_samples

    first = loader.peek_indices(count).tolist()
    sequences = format_samples(samples, first, data.sample_format, data.tokenizer, supports_color())
    say("\n".join(sequences))


def _previous_run(start: InitialState) -> RunFolder | None:
    """Return the folder of the run that is resumed; None for a new run."""
    if not start.step or start.checkpoint is None:
        return None
    return RunFolder.from_step_folder(start.checkpoint.path)


def _keep_base_models(
    config: RunConfig,
    start: InitialState,
    initial_models: Sequence[InitialModel],
    folder: RunFolder,
) -> set[Path]:
    """Copy the base models to which the run's checkpoints refer into the run folder."""
    if config.checkpoint.save is None:
        return set()
    from run.base_model_ref import keep_base_steps

    return keep_base_steps(
        folder, _base_model_refs(config, start, initial_models), start.checkpoint
    )


def _base_model_refs(
    config: RunConfig, start: InitialState, initial_models: Sequence[InitialModel]
) -> list[BaseModelRef]:
    """Return references to the base models whose weights the run's checkpoints do not contain."""
    frozen = start.base if get_family(config).weight_map(config).frozen_names else None
    bases = (frozen, *(model.origin for model in initial_models))
    return [base for base in bases if base is not None]


def _warn_unmirrored_bases(
    config: RunConfig, start: InitialState, initial_models: Sequence[InitialModel]
) -> None:
    """Print base models that are neither in the run's mirror nor on the hub."""
    if config.checkpoint.mirror is None:
        return
    for base in _base_model_refs(config, start, initial_models):
        if base.step is None and os.path.isabs(base.name):
            say(f"the mirror does not copy {format_path(base.name)}, whose weights stay frozen: "
                "another machine needs that folder, and --checkpoint.base_model DIR where it has "
                "another place")  # fmt: skip


def _print_lr_change(config: RunConfig, start: InitialState) -> None:
    """Print a message if a resumed run has another learning rate than before."""
    saved = None if start.checkpoint is None else start.checkpoint.metadata.get("config")
    if saved is None or not start.step:
        return
    with suppress(ConfigError, LookupError, TypeError):  # saved by an older version
        before = type(config.training).from_dict(saved["training"])
        if text := lr_change_message(before, config.training, start.step):
            say(text)


def _verify_checkpoint(start: InitialState) -> None:
    if start.checkpoint is not None:
        start.checkpoint.verify()


def _compile_model(config: RunConfig, frozen: OutputsSource | None) -> TrainingSession:
    teacher_head = None if frozen is None else frozen.teacher_head
    return compile_session(
        lambda: TrainingSession(config, teacher_head=teacher_head), "the training program"
    )


def _create_evaluator(
    config: RunConfig, model: TrainingSession, data_cache: DataCache, frozen: OutputsSource | None
) -> Evaluator | None:
    """Create the evaluator of a run's validation split; None without evaluations."""
    if config.eval.steps is None:
        return None
    from run.evaluation.evaluator import Evaluator

    return Evaluator(config, model, data_cache, frozen)


def _create_best_checkpoint(
    config: RunConfig, start: InitialState, base: Mapping[str, Any]
) -> BestCheckpoint | None:
    """Create the tracker of the best evaluation; None for a run that has none, before or now."""
    if config.eval.steps is None and start.best is None:
        return None
    from run.best_checkpoint import BestCheckpoint

    return BestCheckpoint(config, start.best, base)


def _enter_session(stack: ExitStack, model: TrainingSession, start: InitialState) -> None:
    model.write(start.tensors)
    stack.enter_context(model)


@dataclass(frozen=True)
class _TrainingRun:
    """A training run with its data loader, model on the devices, and checkpoints."""

    config: RunConfig
    options: RunOptions
    loader: Loader
    start: InitialState
    model: TrainingSession
    evaluator: Evaluator | None
    best: BestCheckpoint | None
    skipped: SkippedSteps
    checkpoints: CheckpointManager
    folder: RunFolder
    data_cache: DataCache

    def train(self) -> Interrupted | None:
        """Train all steps, and write metrics, checkpoints and the export.

        Returns:
            The signal that stopped the run, with a message; None if it trained to its end.
        """
        config, options, save = self.config, self.options, self.config.checkpoint.save
        with ExitStack() as stack:
            stop = stack.enter_context(StopSignal())
            records = self._create_metrics_logger()
            if records is not None:
                stack.enter_context(records)
            stack.enter_context(self.checkpoints)
            self.checkpoints.on_train_begin()
            profile: Profiler | None = None
            if options.profile is not None:
                from run.profiler import Profiler, runs_to_profile

                runs = runs_to_profile(config, options, self.start.step)
                profile = Profiler(runs, self.model, options.name, self.folder)
                stack.enter_context(profile)
            disk = self.model.session.disk_idle_clock()
            with Watchdog(options.watchdog_seconds, disk, lambda: stop.received) as watchdog:
                try:
                    last = self._run_steps(records, profile, stop, watchdog)
                except popxl.errors.DeviceMemoryError as error:
                    error.add_note(self.checkpoints.resume_message)
                    raise
            if options.save_hf is not None and stop.name is None:
                from run.hf_export import export_model
                from run.model_card import RunRecords

                weights, base = self.model.tensors(optimizer=False), self.start.base
                record = RunRecords(config.to_dict(), last, self.folder)
                export_model(config, weights, options.save_hf, record, self.data_cache, base)
        if config.checkpoint.keep_best is not None and save is not None:
            from run.best_checkpoint import print_best_step

            print_best_step(save)
        say(f"records of the run are in {self.folder.path}")
        if stop.name is None:
            return None
        if options.save_hf is not None:
            say(f"nothing is in {options.save_hf}: run_export.py writes a model of the checkpoint")
        text = f"stopped by {stop.name} after step {last}"
        resumes = "" if save is None else ": the same command resumes it"
        return Interrupted(signal.Signals[stop.name], text + resumes)

    def _create_metrics_logger(self) -> MetricsLogger | None:
        """Create the metrics logger on process 0."""
        if not is_first_process():
            return None
        use, hardware = mfu_inputs(self.config), describe_devices(self.config)
        return MetricsLogger(self.config, self.folder, self.options, self.start.step, use, hardware)

    def _run_steps(
        self,
        records: MetricsLogger | None,
        profile: Profiler | None,
        stop: StopSignal,
        watchdog: Watchdog,
    ) -> int:
        """Run all optimizer steps, `device_iterations` per program run; returns the last step."""
        config, checkpoints = self.config, self.checkpoints
        lr_schedule = LRSchedule.from_config(config.training)
        iterations = config.execution.device_iterations
        step = self.start.step
        while step < config.training.steps:
            watchdog.mark_activity("meeting", f"the meeting of all before step {step + 1}")
            no_gain = self.best is not None and self.best.should_stop
            stop.poll_all_processes(no_gain, checkpoints.should_save(step))
            if stop.name is not None or stop.finished:
                break
            if stop.save:
                watchdog.mark_activity("save", f"the save of step {step}", is_storage=True)
                checkpoints.save(step)
            steps = range(step, step + iterations)
            learning_rates = [lr_schedule(s) for s in steps]
            watchdog.mark_activity("batches", f"the samples of step {step + 1}")
            batches = [self.loader.next_batch() for _ in steps]
            if profile is not None:
                profile.before_run()
            watchdog.mark_activity("step", f"step {step + 1}")
            results = self.model.run(batches, learning_rates, step)
            step += iterations
            watchdog.mark_activity("evaluation", f"the evaluation after step {step}")
            validation = self._evaluate(step)
            watchdog.mark_activity("records", f"the records of step {step}", is_storage=True)
            before = self.loader.num_samples_seen - iterations * config.training.global_batch_size
            for s, learning_rate, result in zip(steps, learning_rates, results, strict=True):
                seen = before + (s + 1 - steps.start) * config.training.global_batch_size
                self.skipped.count_step(result)
                if records is None:
                    continue
                records.log_step(
                    s + 1,
                    loss=result.loss,
                    learning_rate=learning_rate,
                    grad_norm=result.grad_norm,
                    epoch=seen / self.loader.samples_per_epoch,
                    skipped_steps=self.skipped.total,
                    tokens=result.tokens,
                    **result.aux_metrics,
                    **(validation | checkpoints.report_last_save() if s == step - 1 else {}),
                )
            if self.skipped.too_many_in_a_row:
                break
            watchdog.mark_activity("save", f"the save of step {step}", is_storage=True)
            checkpoints.maybe_save(step)
        watchdog.mark_activity("save", f"the last save, of step {step}", is_storage=True)
        if checkpoints.save_last(step) and records is not None:
            records.log_save(step, checkpoints.report_last_save())
        if self.skipped.too_many_in_a_row:
            raise self.skipped.make_error(checkpoints.saved_message)
        if stop.finished and self.best is not None:
            self.best.print_early_stop()
        return step

    def _evaluate(self, step: int) -> dict[str, Any]:
        """Evaluate if it is due after this step, and update the best checkpoint.

        Returns:
            Metrics to log, and predictions under `samples`; {} without an evaluation.
        """
        every = self.config.eval.steps
        due = every is not None and (
            step % every < self.config.execution.device_iterations
            or step >= self.config.training.steps
        )
        if self.evaluator is None or self.best is None or not due:
            return {}
        result = self.evaluator.evaluate(self.model.tensors(), quiet=True)
        weights = without_optimizer_state(self.model.tensors(frozen=False))
        self.best.on_evaluate(step, result.metrics, weights)
        values = {f"{EVAL_PREFIX}{name}": value for name, value in result.metrics.items()}
        logged = result.predictions[: self.config.eval.log_samples]
        return {**values, SAMPLES: [answer.to_dict() for answer in logged]}


def _end_completed_run(
    config: RunConfig,
    options: RunOptions,
    start: InitialState,
    folder: RunFolder,
    data_cache: DataCache,
) -> None:
    """Print that training is already complete, and export the weights if --save-hf is given."""
    steps = "--steps" if config.training.epochs is None else "--epochs"
    say(
        f"nothing to train: {start.source} is complete, with training.steps "
        f"{config.training.steps}: raise {steps} to resume it; {start.restart_hint}"
    )
    if options.save_hf is not None and is_first_process():
        from run.hf_export import export_model
        from run.model_card import RunRecords

        names = [weight.name for weight in get_family(config).weight_map(config).weights]
        info = RunRecords(config.to_dict(), start.step, folder)
        weights = ArraysView(start.tensors, names)
        export_model(config, weights, options.save_hf, info, data_cache, start.base)


def _restore_data_and_steps(
    config: RunConfig, options: RunOptions, loader: Loader, start: InitialState
) -> RunConfig:
    """Restore the data loader's position; returns the config with the total number of steps."""
    if start.data is not None:
        try:
            loader.restore(start.data)
        except ValueError as error:
            raise UserError(str(error)) from error
    config = resolve_epochs(config, loader.samples_per_epoch, start.step, loader.num_samples_seen)
    if options.profile is None:
        return config
    from run.profiler import limit_steps_to_profile

    return limit_steps_to_profile(config, options, start.step)
