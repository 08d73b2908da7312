"""The machine at hand, as the hardware table would have it: what is free, and what was measured."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

import popxl
from config.sections import RunConfig
from modelling.devices import device_desc, platform
from planning.hardware.machines import Machine, machine, machine_for_device_kind
from planning.hardware.matrix_rate import matrix_rate
from planning.hardware.memory_check import host_memory
from popxl import hardware
from popxl.session import DeviceDesc

_BLOCK = 2**26  # bytes
_BLOCKS = 4
_RUNS = 2


def measure_local_machine(config: RunConfig, folder: str | None) -> Machine:
    """The machine at hand. Takes a few seconds, in which it measures.

    A GPU or TPU has the rates of the hardware table (an H100's, where it is not in there), and its
    own memory. A processor multiplies matrices in the model's precision, and copies bytes.

    Args:
        folder: of a local disk, which is written to and read from; None: the disk that the working
            directory is on, at the rates that the hardware table takes for granted.

    Raises:
        DiskError: `folder` is in use, or has no room for 256 MiB.
    """
    here, memory = platform(config), host_memory()
    own = (
        _processor(config.model.precision)
        if here == "cpu"
        else machine_from_table(device_desc(config))
    )
    if memory is not None:
        own = replace(own, host_memory=memory)
    if here == "cpu":
        own = replace(own, memory=own.host_memory)
    return _with_disk(own, folder)


def machine_from_table(desc: DeviceDesc) -> Machine:
    """Devices that are here, with their own memory, at the rates of the hardware table: of an H100,
    or of a laptop's processor, where it lacks theirs."""
    kind, here = hardware.device_kinds(desc, 1)[0], hardware.platform(desc)
    described = machine_for_device_kind(kind)
    if described is None:
        like = machine("laptop" if here == "cpu" else "h100")
        at_rates = "" if here == "cpu" else ", at the rates of an H100"
        described = replace(like, title=f"{kind}{at_rates}")
    memory = popxl.plan.device_memory(desc, 1)
    if memory is not None:
        described = described.with_usable_bytes(memory)
    return replace(described, name="here", devices=hardware.device_count(desc), platform=here)


def _processor(precision: str) -> Machine:
    rate = matrix_rate("cpu", popxl.dtype.from_name(precision), products=1, runs=_RUNS)
    block = np.zeros(_BLOCK, np.uint8)
    copied = np.empty_like(block)
    bandwidth = 2 * _BLOCK / _best(lambda: np.copyto(copied, block))
    flops = dict.fromkeys(("float32", "float16", "bfloat16"), rate)
    moving = dict.fromkeys(("bandwidth", "host_link", "link"), bandwidth)
    return replace(
        machine("laptop"),
        name="here",
        title="this processor",
        flops=flops,
        bandwidth=bandwidth,
        host_link=bandwidth,
        link=bandwidth,
        achieved=flops | moving,
    )


def _with_disk(machine: Machine, folder: str | None) -> Machine:
    if folder is None:
        return replace(machine, disk=shutil.disk_usage(Path.cwd()).free)
    read, write = disk_rates(folder)
    free = shutil.disk_usage(folder).free
    return replace(machine, disk=free, disk_read=read, disk_write=write)


def disk_rates(folder: str) -> tuple[float, float]:
    """Bytes per second that a disk reads, and that it writes, by requests as entries on disk make
    them: the better of two rounds of 256 MiB.

    Raises:
        DiskError: `folder` is in use, or has no room.
    """
    total, blocks = _BLOCK * _BLOCKS, [np.ones(_BLOCK, np.uint8) for _ in range(_BLOCKS)]
    with (
        popxl.plan.scratch_file(Path(folder), _BLOCKS, _BLOCK) as (file, each),
        ThreadPoolExecutor(_BLOCKS) as pool,
    ):
        at = [i * each for i in range(_BLOCKS)]
        write = _best(lambda: list(pool.map(file.write, at, blocks)))
        read = _best(lambda: list(pool.map(file.read, at, blocks)))
    return total / read, total / write


def _best(do: Callable[[], object]) -> float:
    return min(_once(do) for _ in range(_RUNS))


def _once(do: Callable[[], object]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start
