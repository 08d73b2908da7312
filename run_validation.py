"""Evaluate a model on the validation split: loss, perplexity, and metrics of what it writes.

python3 run_validation.py --load runs/tiny
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from data.task import check_task_and_files
from planning.config_loader import CONFIG_LOADER
from planning.plan_options import add_plan_options, plan_machine, show_plan, wants_plan
from terminal.command_line import read_command_line
from terminal.entry_point import entry_point
from terminal.parser import parse_path_option
from terminal.screen import is_first_process


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=parse_path_option,
        help="where eval.json goes; by default the directory of the checkpoint that is "
        "loaded, else a new one under runs/",
    )
    add_plan_options(parser)


@entry_point(caches=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and evaluate the model on the validation split."""
    line = read_command_line(__doc__, "inference", "tiny", arguments, _add_options, CONFIG_LOADER)
    if not wants_plan(line.options):
        check_task_and_files(line.config.data)
    # These take seconds: mistakes in the command line are said before.
    from data.data_cache import DataCache
    from planning.auto_config import resolve_auto_fields
    from planning.hardware.resource_errors import explain_resource_errors
    from planning.requirements import evaluation_requirements
    from run.evaluation.evaluate_checkpoint import evaluate_checkpoint

    given, data_cache = line.options, DataCache()
    line = resolve_auto_fields(
        line,
        ("validation",),
        only_plans=wants_plan(given),
        machine=plan_machine(line),
        data_cache=data_cache,
    )
    if not show_plan(line, evaluation_requirements):
        with explain_resource_errors(line.preset, line.config):
            summary = evaluate_checkpoint(line.config, line.preset, given.out, data_cache).summary()
        if is_first_process():
            print(summary)


if __name__ == "__main__":
    sys.exit(main())
