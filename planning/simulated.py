"""Simulated steps of presets on machines, side by side."""

from __future__ import annotations

from dataclasses import replace

from config.families import config_class_of
from config.machines import machine
from config.presets import load_config, preset_data
from planning.needs import finetuning_needs
from planning.report import Report, report
from planning.text import gigabytes, two_digits

Case = tuple[str, str, float | None]
"""A preset, a machine, and gigabytes of host memory if not the machine's."""

HEAD = (
    "| Preset | Machine | Step | Samples/s | Matrix rate | Waits for transfers | Device | Host |\n"
    "|---|---|---|---|---|---|---|---|"
)


def simulated(preset: str, on: str, host: float | None = None) -> Report:
    """The plan of a fine-tuning preset, its placement and its simulated run.

    Args:
        on: name of a machine with device memory.
        host: gigabytes of host memory, if not the machine's.

    Raises:
        UserError: there is no such preset or machine.
    """
    target = machine(on)
    if host is not None:
        target = replace(target, title=f"{target.title}, {host:g} GB host", host_memory=host * 1e9)
    config = load_config(
        config_class_of(preset_data("finetuning", preset), preset), "finetuning", preset
    )
    return report(preset, finetuning_needs(config, target.target), target)


def row(case: Case) -> str:
    """A row of a Markdown table below `HEAD`: the fraction of the matrix rate, recomputation
    included, and what waits."""
    made = simulated(*case)
    timeline = made.timeline
    assert timeline is not None, "the machine has device memory"
    cells = (
        f"`{made.preset}`",
        made.machine.title,
        f"{two_digits(timeline.seconds)} s",
        two_digits(made.needs.samples / timeline.seconds),
        f"{made.simulated_utilisation:.0%}",
        f"{timeline.exposed_transfers / timeline.seconds:.0%}",
        gigabytes(made.device_bytes),
        gigabytes(made.bytes_per_host),
    )
    return f"| {' | '.join(cells)} |"
