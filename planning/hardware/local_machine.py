"""The local machine in the hardware table's form: free memory and measured rates."""

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
from modelling.devices import resolve_device_desc, resolve_platform
from planning.hardware.machines import Machine, machine, machine_for_device_kind
from planning.hardware.matrix_rate import measure_matmul_rate
from planning.hardware.memory_check import available_host_bytes
from popxl import hardware
from popxl.session import DeviceDesc

_BLOCK = 2**26  # bytes
_BLOCKS = 4
_RUNS = 2


def measure_local_machine(config: RunConfig, folder: str | None) -> Machine:
    """Measure the local machine in a few seconds: memory, bandwidths and FLOP/s.

    A GPU or TPU gets the rates of the hardware table (an H100's if it is not listed) and its own
    memory. Of a CPU, products in the model's precision and copies are measured.

    Args:
        folder: a folder of the local disk to measure; None: the disk of the working directory, at
            the default rates of the hardware table.

    Raises:
        DiskError: `folder` is in use, or has less than 256 MiB free.
    """
    local_platform, memory = resolve_platform(config), available_host_bytes()
    if local_platform == "cpu":
        local = _measure_processor(config.model.precision)
    else:
        local = machine_from_table(resolve_device_desc(config))
    if memory is not None:
        local = replace(local, host_memory=memory)
    if local_platform == "cpu":
        local = replace(local, memory=local.host_memory)
    return _with_disk_rates(local, folder)


def machine_from_table(desc: DeviceDesc) -> Machine:
    """Return the local devices with their real memory, and rates from the hardware table.

    Devices that it does not list get the rates of an H100, or of a laptop's processor.
    """
    kind, local_platform = hardware.device_kinds(desc, 1)[0], hardware.platform(desc)
    listed = machine_for_device_kind(kind)
    if listed is None:
        default = machine("laptop" if local_platform == "cpu" else "h100")
        at_rates = "" if local_platform == "cpu" else ", at the rates of an H100"
        listed = replace(default, title=f"{kind}{at_rates}")
    memory = popxl.plan.device_memory(desc, 1)
    if memory is not None:
        listed = listed.with_usable_bytes(memory)
    devices = hardware.device_count(desc)
    return replace(listed, name="here", devices=devices, platform=local_platform)


def _measure_processor(precision: str) -> Machine:
    rate = measure_matmul_rate("cpu", popxl.dtype.from_name(precision), products=1, runs=_RUNS)
    block = np.zeros(_BLOCK, np.uint8)
    copy = np.empty_like(block)
    bandwidth = 2 * _BLOCK / _best_seconds(lambda: np.copyto(copy, block))
    flops = dict.fromkeys(("float32", "float16", "bfloat16"), rate)
    transfer_rates = dict.fromkeys(("bandwidth", "host_link", "link"), bandwidth)
    return replace(
        machine("laptop"),
        name="here",
        title="this processor",
        flops=flops,
        bandwidth=bandwidth,
        host_link=bandwidth,
        link=bandwidth,
        achieved=flops | transfer_rates,
    )


def _with_disk_rates(machine: Machine, folder: str | None) -> Machine:
    if folder is None:
        return replace(machine, disk=shutil.disk_usage(Path.cwd()).free)
    read, write = measure_disk_rates(folder)
    free = shutil.disk_usage(folder).free
    return replace(machine, disk=free, disk_read=read, disk_write=write)


def measure_disk_rates(folder: str) -> tuple[float, float]:
    """Measure the read and write bandwidth of a folder's disk in bytes per second.

    The requests are those of entries on disk; the rates are the better of two rounds of 256 MiB.

    Raises:
        DiskError: `folder` is in use, or its disk is full.
    """
    total, blocks = _BLOCK * _BLOCKS, [np.ones(_BLOCK, np.uint8) for _ in range(_BLOCKS)]
    with (
        popxl.plan.scratch_file(Path(folder), _BLOCKS, _BLOCK) as (file, padded_bytes),
        ThreadPoolExecutor(_BLOCKS) as pool,
    ):
        offsets = [i * padded_bytes for i in range(_BLOCKS)]
        write = _best_seconds(lambda: list(pool.map(file.write, offsets, blocks)))
        read = _best_seconds(lambda: list(pool.map(file.read, offsets, blocks)))
    return total / read, total / write


def _best_seconds(function: Callable[[], object]) -> float:
    """Return the shortest wall-clock time in seconds of several calls of a function."""
    return min(_time_call(function) for _ in range(_RUNS))


def _time_call(function: Callable[[], object]) -> float:
    """Return the wall-clock seconds that one call of a function takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
