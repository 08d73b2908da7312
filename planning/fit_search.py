"""How a model is best trained on a machine: on its devices and disk, as simulated runs say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from config.layers import largest_divisor
from config.sections import RunConfig
from planning.expert_group_count import SHARE, bytes_at_work, more
from planning.hardware.machines import Machine
from planning.parallel_layouts import promising
from planning.program_variants import Programs
from planning.report import Report, report
from planning.requirements import bytes_of_weights, finetuning_needs, inference_needs

DISK = "DIR"
"""Stands for a folder of the machine's disk."""


def best_training(
    name: str, configs: Sequence[RunConfig], machine: Machine, programs: Programs | None = None
) -> Report:
    """Return the plan of the fastest layout that fits (`planning.parallel_layouts`), or of the
    first one if none does.

    If the device's memory is too small for a micro-batch, it is halved; what host memory cannot
    hold goes to disk.

    Args:
        name: of the configuration, for people.
        programs: those that there are already.
    """
    programs, best = programs or Programs(), None
    for layout in promising(configs, machine, programs):
        if best is not None and best.fits and not layout.can_take(best.expected_seconds):
            continue
        made = smallest_that_fits(name, layout.config, machine, programs)
        if best is None or _order(made) < _order(best):
            best = made
    assert best is not None, "there is a layout"
    return best


def _order(made: Report) -> tuple[bool, float]:
    return not made.fits, made.expected_seconds


def generation(name: str, config: RunConfig, machine: Machine) -> Report:
    """The plan of generation on one device, with the prompts of a batch of training, and with the
    disk if host memory is too small."""
    one = config.changed({f"execution.{n}": 1 for n in ("data_parallel", "tensor_parallel")})
    if one.generation.weights == "auto" and bytes_of_weights(one) > machine.usable_bytes:
        one = one.changed({"generation.weights": "streamed"})
    made = report(name, inference_needs(one, machine.target), machine)
    if made.fits or one.execution.disk is not None:
        return made
    on_disk = made.needs.config.changed({"execution.disk": DISK})
    other = report(name, inference_needs(on_disk, machine.target), machine)
    return other if other.fits else made


def smallest_that_fits(
    name: str, config: RunConfig, machine: Machine, programs: Programs
) -> Report:
    """The first plan that fits, with more groups of experts, where one takes much, or smaller
    micro-batches, as long as device memory is too small, and with the disk if host memory is."""
    target = machine.target
    needs = finetuning_needs(config, target, programs)
    made = report(name, needs, machine)
    while not made.fits:
        config = made.needs.config
        execution, is_same = config.execution, False
        needed, there = made.shares.get("device memory", (0, 0))
        groups = more(config) if bytes_at_work(config) > SHARE * needed else None
        if needed > there and groups is not None:
            config = config.changed({"execution.expert_groups": groups})
        elif needed > there and execution.micro_batch_size > 1:
            half = largest_divisor(execution.micro_batch_size, execution.micro_batch_size // 2)
            config = config.changed({"execution.micro_batch_size": half})
        elif needed <= there and execution.disk is None:
            config = config.changed({"execution.disk": DISK})
            is_same = machine.platform != "cpu"  # the program, with a disk
        else:
            break
        if is_same:
            needs = replace(needs, config=config)
        else:
            needs = finetuning_needs(config, target, programs)
        made = report(name, needs, machine)
    return made
