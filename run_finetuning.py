"""Fine-tune a T5, BART, T5Gemma, GPT-J or Llama-shaped model on your data, MNLI or the sample.

python3 run_finetuning.py --model FOLDER --data.train rows.jsonl --save runs/mine
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from data.task import check_task_and_files
from planning.config_loader import CONFIG_LOADER
from planning.plan_options import (
    add_devices_option,
    add_plan_options,
    plan_machine,
    show_plan,
    wants_plan,
)
from run.options import RunOptions
from terminal.command_line import format_command, read_command_line
from terminal.entry_point import entry_point
from terminal.screen import is_first_process


def _add_options(parser: argparse.ArgumentParser) -> None:
    RunOptions.add_flags(parser)
    add_plan_options(parser)
    add_devices_option(parser)


@entry_point(caches=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and fine-tune the model."""
    if "--wandb" in (sys.argv if arguments is None else arguments) and is_first_process():
        from terminal.wandb_environment import check_wandb

        check_wandb()
    line = read_command_line(__doc__, "finetuning", "tiny", arguments, _add_options, CONFIG_LOADER)
    options = RunOptions.from_args(line.options, line.preset, format_command(__file__, arguments))
    if not wants_plan(line.options):
        check_task_and_files(line.config.data)
    # These take seconds: mistakes in the command line are said before.
    from data.data_cache import DataCache
    from planning.auto_config import resolve_auto_fields
    from planning.hardware.resource_errors import explain_resource_errors
    from planning.program_variants import VariantCache

    given, data_cache, programs = line.options, DataCache(), VariantCache()
    line = resolve_auto_fields(
        line,
        ("train",),
        trains=True,
        only_plans=wants_plan(given),
        machine=plan_machine(line),
        count=given.devices,
        data_cache=data_cache,
        programs=programs,
    )
    if wants_plan(given):
        from planning.requirements import finetuning_requirements

        show_plan(line, partial(finetuning_requirements, programs=programs), programs)
        return
    from run.training_loop import finetune

    del programs  # gigabytes
    with explain_resource_errors(line.preset, line.config):
        finetune(line.config, options, data_cache)


if __name__ == "__main__":
    sys.exit(main())
