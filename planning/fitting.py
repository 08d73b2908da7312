"""How a model is best trained on a machine: on its devices and disk, as simulated runs say."""

from __future__ import annotations

from collections.abc import Iterator

from config.errors import ConfigError
from config.machines import Machine
from config.sections import RunConfig
from planning.needs import finetuning_needs, inference_needs
from planning.report import Report, report

_HERE = "DIR"  # stands for a folder of the machine's disk


def best_training(name: str, config: RunConfig, machine: Machine, devices: int) -> Report:
    """The plan of the fastest way to train that fits, or the last that was tried where none does.

    The devices share each layer, or the batch, or what a person asked for. If the device's memory
    is too small for a micro-batch, it is halved; what host memory cannot hold goes to disk.

    Args:
        name: of the configuration, for people.
        devices: how many are used.

    Raises:
        ConfigError: the model cannot be cut over so many devices.
    """
    found = [_smallest_that_fits(name, each, machine) for each in _layouts(config, devices)]
    if not found:
        raise ConfigError(
            f"{name} cannot run on {devices} devices: neither its batch of "
            f"{config.training.global_batch_size} nor its layers can be shared by so many"
        )
    return min(found, key=lambda made: (not made.fits, made.expected_seconds))


def generation(name: str, config: RunConfig, machine: Machine) -> Report:
    """The plan of generation on one device, with the prompts of a batch of training."""
    one = _changed(config, data_parallel=1, tensor_parallel=1)
    return report(name, inference_needs(one, machine.platform), machine)


def _layouts(config: RunConfig, devices: int) -> Iterator[RunConfig]:
    """The batch shared by the devices, and each layer."""
    for data in dict.fromkeys((devices, 1)):
        e, batch = config.execution, config.training.global_batch_size
        if batch % data:
            continue
        micro = _divisor(batch // data, e.micro_batch_size)
        try:
            yield _changed(
                config,
                data_parallel=data,
                tensor_parallel=devices // data,
                micro_batch_size=micro,
            )
        except ConfigError:  # heads or features that so many devices cannot share
            continue


def _smallest_that_fits(name: str, config: RunConfig, machine: Machine) -> Report:
    """With smaller micro-batches as long as device memory is too small, and with the disk if host
    memory is."""
    made = report(name, finetuning_needs(config, machine.platform), machine)
    while not made.fits:
        execution = made.needs.config.execution
        needed, there = made.shares.get("device memory", (0, 0))
        if needed > there and execution.micro_batch_size > 1:
            half = _divisor(execution.micro_batch_size, execution.micro_batch_size // 2)
            config = _changed(made.needs.config, micro_batch_size=half)
        elif needed <= there and execution.disk is None:
            config = _changed(made.needs.config, disk=_HERE)
        else:
            break
        made = report(name, finetuning_needs(config, machine.platform), machine)
    return made


def _changed(config: RunConfig, **execution: object) -> RunConfig:
    """The configuration with fields of its section `execution` changed, and checked again."""
    data = config.to_dict()
    return type(config).from_dict(data | {"execution": {**data["execution"], **execution}})


def _divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most `most`."""
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)
