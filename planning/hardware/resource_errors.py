"""Error messages on missing devices and memory, with the flags that help."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import popdist
import popxl
from config.errors import UserError
from config.sections import RunConfig
from files.formatting import format_name, format_value
from planning.hardware.memory_check import NotEnoughMemoryError


@contextmanager
def explain_resource_errors(preset: str, config: RunConfig) -> Iterator[None]:
    """A context that turns errors on devices, memory, disks and JAX's version into `UserError`s.

    Args:
        preset: name of the preset in the message.

    Raises:
        UserError: it says what is needed, what there is, and what to do.
    """
    name = f"'{format_name(preset, 40)}'"  # or the path of a file
    try:
        yield
    except popxl.errors.DeviceError as error:
        e = config.execution
        raise UserError(
            f"preset {name} needs {error.needed} {error.platform} device(s), "
            f"data_parallel {e.data_parallel} × tensor_parallel {e.tensor_parallel}, "
            f"but there are {error.num_available}: {_device_advice(error)}"
        ) from error
    except popdist.DistributedError as error:
        e = config.execution
        raise UserError(
            f"preset {preset!r} needs {config.num_replicas} devices, data_parallel "
            f"{e.data_parallel} × tensor_parallel {e.tensor_parallel}, which "
            f"{popdist.getNumInstances()} processes cannot share equally: "
            "start another number of them"
        ) from error
    except (popxl.errors.DiskError, popxl.errors.VersionError) as error:
        raise UserError(str(error)) from error
    except popxl.errors.DeviceMemoryError as error:
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
        raise UserError(f"preset {name}: {error}: {_reduce_memory(config)}{notes}") from error
    except NotEnoughMemoryError as error:
        if error.place == "limit":
            raise UserError(
                f"preset {name} needs {error.needed / 1e9:.1f} GB of host memory at the least "
                f"({error.parts}), but execution.host_memory is {config.execution.host_memory:g}: "
                "raise it, or lower --micro_batch_size"
            ) from error
        raise UserError(
            f"preset {name} needs {error.needed / 1e9:.1f} GB of {_WHERE[error.place]} "
            f"({error.parts}), but {error.available / 1e9:.1f} GB are free: "
            f"{_memory_advice(error)}; --plan shows what each phase needs"
        ) from error


def _memory_advice(error: NotEnoughMemoryError) -> str:
    """Return a message's advice on flags with which a program needs less memory."""
    if error.disk is None:
        return _ADVICE[error.place]
    return f"add --execution.disk DIR, a folder of a local disk with {error.disk / 1e9:.1f} GB free"


_WHERE = {"host": "host memory", "device": "device memory", "host and disk": "memory and disk"}
_ADVICE = {
    "host": "lower --micro_batch_size, or take a smaller preset",
    "host and disk": "name a folder with more room in --execution.disk, or take a smaller preset",
    "device": "lower --micro_batch_size, raise --tensor_parallel, or take a smaller preset",
}


def _reduce_memory(config: RunConfig) -> str:
    """Return a message's advice on flags with which a program needs less device memory."""
    e, trains = config.execution, not config.model.eval
    lower = ["--micro_batch_size"] * (e.micro_batch_size > 1)
    per_pass = config.micro_batches_per_pass
    can_lower = per_pass != 1 and not config.training.needs_whole_batch
    if trains and can_lower and config.gradient_accumulation > 1:
        lower.append("--execution.micro_batches_per_pass")
    advice = [f"lower {' or '.join(lower)}"] * bool(lower)
    if trains and e.activations != "recompute":
        advice.append("recompute with --activations recompute")
    advice.append("leave state in host memory with --execution.placement host")
    return f"{', '.join(advice[:-1])}, or {advice[-1]}" if advice[:-1] else advice[-1]


def _device_advice(error: popxl.errors.DeviceError) -> str:
    """Return a message's advice on flags if more devices are requested than there are."""
    lower = "lower --data_parallel or --tensor_parallel, or "
    if error.platform == "cpu" and not error.num_available:
        platforms = format_value(os.environ.get("JAX_PLATFORMS", ""))
        return f"the environment variable JAX_PLATFORMS is {platforms}: unset it, or set it to cpu"
    if error.platform == "cpu":  # only a limit set in XLA_FLAGS can be too low
        return lower + "take xla_force_host_platform_device_count out of XLA_FLAGS"
    if error.num_available:
        return lower + "use a machine that has them, or --device cpu for virtual devices"
    requirements = {"gpu": "requirements-cuda.txt"}.get(error.platform, "requirements-tpu.txt")
    return (
        f"on a machine that has them, pip install -r {requirements}; --device cpu takes virtual "
        "devices"
    )
