"""The validation run: evaluate what `checkpoint.load` names, and write validation.json."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import popdist
from checkpoints import CheckpointStore, has_checkpoint
from config.agreement import agree, agree_on_run
from config.sections import RunConfig
from files.writing import check_folder
from machine.devices import announce_devices
from machine.memory import check_least
from modelling.spec import family_of
from run.evaluation.evaluator import Evaluator
from run.evaluation.outcome import Outcome
from run.records.run_directory import choose_path
from run.start import load_weights
from terminal.screen import is_first_process, say


def validate(config: RunConfig, name: str, out: str | None = None) -> Outcome:
    """Evaluate a configuration, and write validation.json.

    Args:
        name: of the configuration, for a new directory.
        out: where validation.json goes; by default next to the checkpoint, else a new directory.

    Raises:
        UserError: for anything a person can mend.
    """
    agree_on_run(config)
    directory = Path(popdist.gather(str(_directory(config, name, out)))[0])
    check_folder("the report to", directory)
    check_least(config)
    announce_devices(config)
    family = family_of(config)
    start = load_weights(config, family.weights(config))
    agree({"step of the weights": start.step, "digest of the weights": start.sha256})
    evaluator = Evaluator(config, family)
    begin = time.perf_counter()
    start, outcome = start.load_with_fallback(lambda one: evaluator.evaluate(one.tensors))
    seconds = time.perf_counter() - begin
    facts = {"weights": start.source, "step": start.step, "seconds": round(seconds, 3)}
    outcome = replace(outcome, facts=facts | dict(outcome.facts))
    path = outcome.write(directory) if is_first_process() else directory
    say(f"evaluated in {seconds:.1f} s; details are in {path}")
    return outcome


def _directory(config: RunConfig, name: str, out: str | None) -> Path:
    """Where the report goes: what --out names, else next to the checkpoints, else a new one."""
    load = config.checkpoint.load
    if out or load is None or not has_checkpoint(load):
        return choose_path(out, None, f"validation-{Path(name).stem}")
    is_one_step = not CheckpointStore(load).steps()
    return Path(load).parent if is_one_step else Path(load)
