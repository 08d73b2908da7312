"""Command line options of plans (`--plan`, `--plan-json`, ...) and their output."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from config.errors import UserError
from config.sections import RunConfig
from files.atomic_writing import check_can_write_file, write_text_atomically
from planning.hardware.machines import Machine, machine, machines
from terminal.command_line import CommandLine
from terminal.parser import parse_count_option, parse_path_option
from terminal.screen import is_first_process

if TYPE_CHECKING:  # planning takes seconds to import, and the options are read first
    from planning.program_variants import VariantCache
    from planning.report import PlanReport
    from planning.requirements import Requirements


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of plans to the parser of a script."""
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--plan",
        action="store_true",
        help="show what the program needs and how long it takes, and stop",
    )
    group.add_argument(
        "--plan-json",
        metavar="FILE",
        type=parse_path_option,
        help="write the plan as JSON, and stop",
    )
    group.add_argument(
        "--plan-picture",
        metavar="FILE",
        type=parse_path_option,
        help="draw the plan as PNG, and stop",
    )
    group.add_argument(
        "--plan-trace",
        metavar="FILE",
        type=parse_path_option,
        help="write a simulated run for Perfetto (ui.perfetto.dev) as JSON, and stop",
    )
    group.add_argument(
        "--machine",
        metavar="NAME",
        help=f"what to estimate times for: {', '.join(machines())}, or a YAML file with the fields "
        "of planning/hardware/machines.yml (default: laptop for one device in float32, else h100)",
    )


def add_devices_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--devices` of a script that trains or plans training."""
    parser.add_argument(
        "--devices",
        type=parse_count_option,
        metavar="N",
        help="devices to use, in the fastest layout (default: all)",
    )


def plan_machine(line: CommandLine) -> Machine | None:
    """Return the machine of `--machine`, or the preset's likely one; None for the local machine.

    Raises:
        UserError: it is not in the hardware table.
    """
    if not wants_plan(line.options):
        return None
    if line.options.machine:
        return machine(line.options.machine)
    return None if line.settings.has_auto_fields else default_machine(line.config)


class RequirementsFn(Protocol):
    """A function that computes the memory and time requirements of a configuration's program."""

    def __call__(self, config: RunConfig, target: str = "cpu") -> Requirements: ...


def _check_output_files(options: argparse.Namespace) -> dict[str, str | None]:
    """Return the paths of the requested output files, by the file's name in messages."""
    return {
        "the plan": options.plan_json,
        "the picture": options.plan_picture,
        "the trace": options.plan_trace,
    }


def wants_plan(options: argparse.Namespace) -> bool:
    """Return True if the options ask for a plan."""
    return options.plan or any(path is not None for path in _check_output_files(options).values())


def show_plan(
    line: CommandLine, requirements_fn: RequirementsFn, programs: VariantCache | None = None
) -> bool:
    """Print and write a plan if the command line asks for one; returns True if it does.

    Args:
        programs: cache of traced programs.

    Raises:
        UserError: the machine is not in the hardware table, or a file cannot be written.
    """
    options = line.options
    if not wants_plan(options):
        return False
    if not is_first_process():
        return True
    for what, path in _check_output_files(options).items():
        if path is not None:
            check_can_write_file(what, path)
    from planning.program_variants import VariantCache
    from planning.report import make_report
    from planning.report_text import format_report
    from planning.speed_advice import with_speed_advice
    from planning.teacher_pass import format_teacher_pass, plan_teacher_pass
    from popxl.plan import gc_disabled

    target = machine(options.machine) if options.machine else default_machine(line.config)
    with gc_disabled():
        report = make_report(line.preset, requirements_fn(line.config, target.target), target)
        report = with_speed_advice(
            report, programs or VariantCache(), line.settings.has_explicit_layout
        )
        teacher = plan_teacher_pass(line.config, target) if report.trains else None
    if options.plan:
        print(format_report(report))
        if teacher is not None:
            print(f"\n{format_teacher_pass(teacher, line.config)}")
    if options.plan_json is not None:
        _write_json(report, teacher, Path(options.plan_json))
    if options.plan_picture is not None:
        from planning.report_plot import plot_report  # Matplotlib takes a second to import

        plot_report(report, Path(options.plan_picture))
        print(f"the picture is in {options.plan_picture}", file=sys.stderr)
    if options.plan_trace is not None:
        _write_trace(report, Path(options.plan_trace))
    return True


def default_machine(config: RunConfig) -> Machine:
    """Return the machine of the hardware table on which a configuration is likely to run."""
    small = config.num_replicas == 1 and config.model.precision == "float32"
    return machine("laptop" if small else "h100")


def _write_json(report: PlanReport, teacher: PlanReport | None, path: Path) -> None:
    plan = report.as_dict() | ({} if teacher is None else {"teacher": teacher.as_dict()})
    write_text_atomically("the plan", path, json.dumps(plan, indent=2) + "\n")
    print(f"the plan is in {path}", file=sys.stderr)


def _write_trace(report: PlanReport, path: Path) -> None:
    if report.timeline is None:
        raise UserError(
            f"--plan-trace: on {report.machine.title} devices share the host's memory, so nothing "
            "is transferred: name a GPU with --machine"
        )
    write_text_atomically("the trace", path, json.dumps(report.timeline.to_chrome_trace()) + "\n")
    print(f"the trace is in {path}: open it in ui.perfetto.dev", file=sys.stderr)
