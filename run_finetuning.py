"""Fine-tune a T5, GPT-J or Llama-shaped model: on your own data, on MNLI, or on the sample corpus.

python3 run_finetuning.py --model FOLDER --data.train rows.jsonl --save runs/mine
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from planning.options import add_plan_options, is_planned, planned, planned_machine
from planning.origins import ORIGINS
from run.options import RunOptions
from terminal.command_line import read_command_line, typed
from terminal.entry_point import entry_point
from terminal.parser import add_export_option, count_option, path_option


def _add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--fresh",
        action="store_true",
        help="delete the run that is in --save and start over; without it that run is continued",
    )
    group.add_argument(
        "--run-dir",
        metavar="DIR",
        type=path_option,
        help="where config.yml, metrics.jsonl and the loss curve go; by default what --save names, "
        "else a new directory under runs/",
    )
    group.add_argument("--wandb", action="store_true", help="log the run to Weights & Biases")
    group.add_argument("--wandb-name", metavar="NAME", help="name of the Weights & Biases run")
    group.add_argument(
        "--tensorboard",
        action="store_true",
        help="write TensorBoard's events to the run directory",
    )
    group.add_argument(
        "--data.preview",
        dest="preview",
        metavar="N",
        type=count_option,
        default=0,
        help="print N samples as tokens, with what is learned of them, before anything is compiled",
    )
    group.add_argument(
        "--profile",
        metavar="STEPS",
        type=count_option,
        help="write a trace of so many steps, and a table of time by phase, into the run directory",
    )
    add_export_option(parser)
    add_plan_options(parser)


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and train."""
    line = read_command_line(__doc__, "finetuning", "tiny", arguments, _add_options, ORIGINS)
    # These take seconds: mistakes in the command line are said before.
    from machine.shortage import explain_shortages
    from planning.choices import with_choices
    from planning.needs import finetuning_needs
    from run.loop import finetune

    given = line.options
    line = with_choices(
        line,
        ("train",),
        trains=True,
        fresh=given.fresh,
        only_plans=is_planned(given),
        machine=planned_machine(given),
    )
    if planned(line, finetuning_needs):
        return
    options = RunOptions(
        name=line.preset,
        run_dir=given.run_dir,
        fresh=given.fresh,
        save_hf=given.save_hf,
        wandb=given.wandb,
        wandb_name=given.wandb_name,
        tensorboard=given.tensorboard,
        profile=given.profile,
        command=typed(__file__, arguments),
        preview=given.preview,
    )
    with explain_shortages(line.preset, line.config):
        finetune(line.config, options)


if __name__ == "__main__":
    sys.exit(main())
