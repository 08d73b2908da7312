"""Evaluate the weights of `checkpoint.load` and write eval.json."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import popdist
from checkpoints import CheckpointStore, has_checkpoint
from config.process_checks import check_same_run_on_all_processes
from config.sections import RunConfig
from data.data_cache import DataCache
from data.pipeline import Pipeline
from files.atomic_writing import check_can_write_folder
from files.run_folder import RunFolder
from modelling.model_family import get_family
from run.evaluation.eval_result import EvalResult
from run.evaluation.evaluator import Evaluator
from run.initial_model_logps import initial_model_logps_from_checkpoint
from run.startup_warnings import length_warnings
from run.teacher import Teacher
from run.weight_loading import load_inference_weights
from terminal.screen import is_first_process, say


def evaluate_checkpoint(
    config: RunConfig, name: str, out: str | None = None, data_cache: DataCache | None = None
) -> EvalResult:
    """Evaluate a config's weights on its validation split, and write eval.json.

    Args:
        name: name of the config, for a new folder.
        out: folder of eval.json; default: next to the checkpoint, else a new folder.
        data_cache: data that is already loaded.

    Raises:
        UserError: an error that a user can fix.
    """
    check_same_run_on_all_processes(config)
    folder = RunFolder(
        Path(popdist.all_gather_object(str(_result_folder(config, name, out).path))[0])
    )
    check_can_write_folder("the report to", folder.path)
    for note in length_warnings(config):
        say(note)
    data_cache = data_cache or DataCache()
    if config.training.row_type == "labeled":  # the head has a row for each class
        config = Pipeline(config, get_family(config).sample_format, data_cache).config
    start = load_inference_weights(config)
    initial_model_logps = initial_model_logps_from_checkpoint(config, start)
    data_cache = data_cache or DataCache()
    data = Pipeline(config, get_family(config).sample_format, data_cache)
    run = None if start.checkpoint is None else RunFolder.from_step_folder(start.checkpoint.path)
    frozen = initial_model_logps or Teacher.for_run(config, run or folder, data)
    evaluator = Evaluator(config, None, data_cache, frozen)
    begin = time.perf_counter()
    start, result = start.load_with_fallback(lambda one: evaluator.evaluate(one.tensors))
    seconds = time.perf_counter() - begin
    info = {"weights": start.source, "step": start.step, "seconds": round(seconds, 3)}
    result = replace(result, info=info | dict(result.info))
    if is_first_process():
        result.write(folder.eval_json)
    say(f"evaluated in {seconds:.1f} s; details are in {folder.eval_json}")
    return result


def _result_folder(config: RunConfig, name: str, out: str | None) -> RunFolder:
    """Return the folder of eval.json: --out, that of the checkpoint's run, or a new one."""
    load = config.checkpoint.load
    if out or load is None or not has_checkpoint(load):
        return RunFolder.from_options(out, None, f"validation-{Path(name).stem}")
    is_one_step = not CheckpointStore(load).steps()
    return RunFolder(Path(load).parent if is_one_step else Path(load))
