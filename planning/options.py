"""The command line of plans: `--plan`, and where else than to the screen it goes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from config.sections import RunConfig
from files.writing import check_file, write_text
from planning.machines import Machine, machine, machines
from terminal.command_line import CommandLine
from terminal.parser import path_option
from terminal.screen import is_heard

if TYPE_CHECKING:  # what makes plans takes seconds to import, and the options are read before
    from planning.needs import Needs
    from planning.report import Report


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Options of a script whose program can be planned."""
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--plan",
        action="store_true",
        help="show what the program needs and how long it takes, and stop; needs no devices",
    )
    group.add_argument(
        "--plan-json", metavar="FILE", type=path_option, help="write the plan as JSON, and stop"
    )
    group.add_argument(
        "--plan-picture", metavar="FILE", type=path_option, help="draw the plan as PNG, and stop"
    )
    group.add_argument(
        "--machine",
        metavar="NAME",
        help=f"what to estimate times for: {', '.join(machines())} "
        "(default: laptop for one device in float32, else h100)",
    )


def planned(line: CommandLine, needs_of: Callable[[RunConfig], Needs]) -> bool:
    """Show the plan if the command line asks for one, and say whether it did.

    Raises:
        UserError: the machine is not in the hardware table, or a file cannot be written.
    """
    options = line.options
    if not (options.plan or options.plan_json is not None or options.plan_picture is not None):
        return False
    if not is_heard():
        return True
    for what, path in (("the plan", options.plan_json), ("the picture", options.plan_picture)):
        if path is not None:
            check_file(what, path)
    from planning.picture import draw_plan
    from planning.report import report
    from planning.text import as_text

    target = machine(options.machine) if options.machine else default_machine(line.config)
    made = report(line.preset, needs_of(line.config), target)
    if options.plan:
        print(as_text(made))
    if options.plan_json is not None:
        _write_json(made, Path(options.plan_json))
    if options.plan_picture is not None:
        draw_plan(made, Path(options.plan_picture))
        print(f"the picture is in {options.plan_picture}", file=sys.stderr)
    return True


def default_machine(config: RunConfig) -> Machine:
    """Where such a configuration is likely to run."""
    small = config.replicas == 1 and config.model.precision == "float32"
    return machine("laptop" if small else "h100")


def _write_json(made: Report, path: Path) -> None:
    write_text("the plan", path, json.dumps(made.as_dict(), indent=2) + "\n")
    print(f"the plan is in {path}", file=sys.stderr)
