"""Rank, world size and coordinator address of this process, from arguments or the environment."""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass, field, replace

NUM_INSTANCES = "POPDIST_NUM_INSTANCES"
INSTANCE_INDEX = "POPDIST_INSTANCE_INDEX"
TOTAL_REPLICAS = "POPDIST_NUM_TOTAL_REPLICAS"
COORDINATOR = "POPDIST_COORDINATOR"
SECRET, SECRET_FILE = "POPDIST_SECRET", "POPDIST_SECRET_FILE"
RUN = "POPDIST_RUN"
SILENCE = "POPDIST_SILENCE"
LOOPBACK = "127.0.0.1"
MAX_PROCESSES = 16_384  # processes
DEFAULT_SILENCE, MIN_SILENCE, MAX_SILENCE = 60, 3, 86_400  # seconds
_FIRST_PORT = 61440
_ADDRESS = re.compile(r"(?:[\w.-]+|\[[\w.:%]+\]):([0-9]{1,5})", re.ASCII)

# Where launchers tell their number of processes, and the index of each.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


class DistributedError(RuntimeError):
    """Error: the processes of a run cannot start or work together."""


@dataclass(frozen=True)
class ProcessInfo:
    """Rank, world size, coordinator and secret of one process of a run.

    Attributes:
        index: from 0.
        count: number of processes (world size).
        coordinator: HOST:PORT at which they meet; None: JAX finds the host.
        run: name of the run, which another run at the same port does not have.
        secret: shared by the processes of the run.
        silence_timeout: seconds after which a process that was not heard of is gone.
    """

    index: int = 0
    count: int = 1
    coordinator: str | None = None
    run: str = ""
    secret: str = field(default="", repr=False)
    silence_timeout: int = DEFAULT_SILENCE

    @property
    def port(self) -> int:
        """Default port of the coordinator, derived from the run's name."""
        return _FIRST_PORT + zlib.crc32(self.run.encode()) % 4096


def env_int(variable_name: str, default: int) -> int:
    """Returns an environment variable as an integer.

    Raises:
        DistributedError: the variable is not a number.
    """
    value = os.environ.get(variable_name, "")
    if not value:
        return default
    if not value.isdecimal() or len(value) > 18:
        text = value if len(value) < 40 else f"{value[:40]}…"
        raise DistributedError(
            f"the environment variable {variable_name} is {text!r}: set it to a number"
        )
    return int(value)


def silence_timeout() -> int:
    """Returns the seconds after which a silent process counts as lost (`POPDIST_SILENCE`).

    Raises:
        DistributedError: the variable is not a number, or out of range.
    """
    seconds = env_int(SILENCE, DEFAULT_SILENCE)
    if not MIN_SILENCE <= seconds <= MAX_SILENCE:
        raise DistributedError(
            f"the environment variable {SILENCE} is {seconds}: set it to seconds from "
            f"{MIN_SILENCE} to {MAX_SILENCE}"
        )
    return seconds


def process_info_from_args(processes: int, process: int, coordinator: str) -> ProcessInfo:
    """Returns the process info from the three arguments of `popdist.init`.

    Raises:
        DistributedError: the arguments are invalid.
    """
    match = _ADDRESS.fullmatch(coordinator)
    if match is None or not 0 < int(match[1]) < 2**16:
        raise DistributedError(
            f"the coordinator {coordinator[:100]!r} is no HOST:PORT: name the host of process 0 "
            "and a free port of it"
        )
    return _validate_info(
        ProcessInfo(process, processes, coordinator, os.environ.get(RUN, ""), _read_secret())
    )


def _read_secret() -> str:
    """Returns the run's secret; "" if there is none.

    From the environment, or from a file that only this user can read.

    Raises:
        DistributedError: the file cannot be read, or others can read it.
    """
    path = os.environ.get(SECRET_FILE)
    if not path or os.environ.get(SECRET):
        return os.environ.get(SECRET, "")
    try:
        with open(path, encoding="utf-8") as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read().strip()
    except (OSError, ValueError) as error:
        raise DistributedError(f"{SECRET_FILE} names {path}, which cannot be read") from error
    if mode & 0o077 or not text:
        problem = "is empty" if not text else "others can read: `chmod 600` it"
        raise DistributedError(f"{SECRET_FILE} names {path}, which {problem}")
    return text


def _validate_info(info: ProcessInfo) -> ProcessInfo:
    """Returns the process info; raises DistributedError if it is invalid."""
    if not 1 <= info.count <= MAX_PROCESSES:
        raise DistributedError(
            f"a run has 1 to {MAX_PROCESSES} processes, but is given {str(info.count)[:20]}"
        )
    if not 0 <= info.index < info.count:
        raise DistributedError(
            f"process {str(info.index)[:20]} is not one of {info.count} processes: they are "
            "numbered from 0"
        )
    return replace(info, silence_timeout=silence_timeout())


def process_info_from_env() -> ProcessInfo:
    """Returns the process info from the environment.

    From `POPDIST_*`, else from Open MPI's or Slurm's variables, else for a single process.

    Raises:
        DistributedError: the variables are invalid.
    """
    if os.environ.get(NUM_INSTANCES):
        count, index = env_int(NUM_INSTANCES, 1), env_int(INSTANCE_INDEX, 0)
        coordinator = os.environ.get(COORDINATOR)
        if coordinator:
            return process_info_from_args(count, index, coordinator)
        return _validate_info(ProcessInfo(index, count, secret=_read_secret()))
    for of_count, of_index in _LAUNCHERS:
        if of_index in os.environ and env_int(of_count, 1) > 1:
            index, count = env_int(of_index, 0), env_int(of_count, 1)
            info = _validate_info(
                ProcessInfo(index, count, None, _launcher_run_id(), _read_secret())
            )
            if _runs_on_one_host():
                return replace(info, coordinator=f"{LOOPBACK}:{info.port}")
            return info
    return ProcessInfo()


def _runs_on_one_host() -> bool:
    """True if the MPI or Slurm launcher runs all processes on one host."""
    env = os.environ
    open_mpi = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == env.get("OMPI_COMM_WORLD_SIZE", "")
    return open_mpi or env.get("SLURM_STEP_NUM_NODES") == "1"


def _launcher_run_id() -> str:
    """Returns the launcher's identifier of the run, the same in all processes of the run.

    Two steps of one job of Slurm are two runs, and so is a job that was put into the queue again.
    """
    env = os.environ
    named = (RUN, "OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE")
    run_id = next((env[name] for name in named if env.get(name)), None)
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return run_id or "slurm " + ".".join(env.get(name, "") for name in slurm)
