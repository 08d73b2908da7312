"""Which of several processes this one is: from arguments, or from the environment."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NUM_INSTANCES = "POPDIST_NUM_INSTANCES"
INSTANCE_INDEX = "POPDIST_INSTANCE_INDEX"
TOTAL_REPLICAS = "POPDIST_NUM_TOTAL_REPLICAS"
COORDINATOR = "POPDIST_COORDINATOR"
LOOPBACK = "127.0.0.1"
MOST = 16_384  # processes
_FIRST_PORT = 61440
_ADDRESS = re.compile(r"(?:[\w.-]+|\[[\w.:%]+\]):([0-9]{1,5})", re.ASCII)

# Where launchers tell their number of processes, and the index of each.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


class DistributedError(RuntimeError):
    """Processes that cannot work together."""


@dataclass(frozen=True)
class Place:
    """One of several processes.

    Attributes:
        index: from 0.
        count: how many there are.
        coordinator: HOST:PORT at which they meet; None: JAX finds it.
    """

    index: int = 0
    count: int = 1
    coordinator: str | None = None


def number(variable: str, default: int) -> int:
    """A number in the environment.

    Raises:
        DistributedError: it is none.
    """
    value = os.environ.get(variable, "")
    if not value:
        return default
    if not value.isdecimal() or len(value) > 18:
        shown = value if len(value) < 40 else f"{value[:40]}…"
        raise DistributedError(
            f"the environment variable {variable} is {shown!r}: set it to a number"
        )
    return int(value)


def place_given(processes: int, process: int, coordinator: str) -> Place:
    """The place that three arguments name.

    Raises:
        DistributedError: they do not fit.
    """
    found = _ADDRESS.fullmatch(coordinator)
    if found is None or not 0 < int(found[1]) < 2**16:
        raise DistributedError(
            f"the coordinator {coordinator[:100]!r} is no HOST:PORT: name the host of process 0 "
            "and a free port of it"
        )
    return _checked(Place(process, processes, coordinator))


def _checked(place: Place) -> Place:
    """The place. Raises DistributedError if there is none such."""
    if not 1 <= place.count <= MOST:
        raise DistributedError(
            f"a run has 1 to {MOST} processes, but is given {str(place.count)[:20]}"
        )
    if not 0 <= place.index < place.count:
        raise DistributedError(
            f"process {str(place.index)[:20]} is not one of {place.count} processes: they are "
            "numbered from 0"
        )
    return place


def place_of_environment() -> Place:
    """The place that the environment tells: `POPDIST_*`, else Open MPI's or Slurm's; else alone.

    Raises:
        DistributedError: what it tells cannot be.
    """
    if os.environ.get(NUM_INSTANCES):
        count, index = number(NUM_INSTANCES, 1), number(INSTANCE_INDEX, 0)
        coordinator = os.environ.get(COORDINATOR)
        if coordinator:
            return place_given(count, index, coordinator)
        return _checked(Place(index, count))
    for of_count, of_index in _LAUNCHERS:
        if of_index in os.environ and number(of_count, 1) > 1:
            return _checked(Place(number(of_index, 0), number(of_count, 1), _on_one_host()))
    return Place()


def _on_one_host() -> str | None:
    """Where processes of a launcher meet if one host has them all."""
    env = os.environ
    open_mpi = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == env.get("OMPI_COMM_WORLD_SIZE", "")
    if not open_mpi and env.get("SLURM_STEP_NUM_NODES") != "1":
        return None
    # Different for each run, and the same in all of its processes.
    run = env.get("OMPI_MCA_orte_hnp_uri") or env.get("PMIX_NAMESPACE") or env.get("SLURM_JOB_ID")
    return f"{LOOPBACK}:{_FIRST_PORT + zlib.crc32((run or '').encode()) % 4096}"


def devices_of(index: int, neighbours: Sequence[tuple[str, Sequence[str]]]) -> list[int] | None:
    """Which of the GPUs that it sees a process uses; None: all of them.

    Processes of a host that see the same GPUs share them equally, in order. Those that see
    different ones were given theirs by whoever started them.

    Args:
        neighbours: host and visible GPUs of each process.
    """
    host, visible = neighbours[index]
    here = [i for i, (other, _) in enumerate(neighbours) if other == host]
    alike = all(list(neighbours[i][1]) == list(visible) for i in here)
    share = len(visible) // len(here)
    if len(here) == 1 or not alike or not share:
        return None
    first = here.index(index) * share
    return list(range(first, first + share))


def visible_gpus(environment: Mapping[str, str], files: Sequence[str]) -> list[str]:
    """NVIDIA's GPUs that a process may use, from its environment, else from the names in /dev."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    return sorted(name for name in files if re.fullmatch(r"nvidia\d+", name))
