"""Multi-process programs: initialization, rank and world size, and small collectives on the host.

The process group comes from the arguments of `init`, from the environment variables
`POPDIST_NUM_INSTANCES`, `POPDIST_INSTANCE_INDEX` and `POPDIST_COORDINATOR` (which `python3 -m
popdist.run` sets), from Open MPI's `mpirun` or from Slurm's `srun`. `popxl.Session` calls `init`
for programs with `popxl.Ir(replication="popdist")`.

Names in camel case are PopDist's; the functions at the end are additions.
"""

from __future__ import annotations

import os as _os
import sys as _sys
from contextlib import AbstractContextManager, nullcontext
from contextlib import suppress as _suppress
from typing import TYPE_CHECKING, Any, NoReturn

from popdist._process_info import NUM_INSTANCES as _NUM_INSTANCES
from popdist._process_info import TOTAL_REPLICAS as _TOTAL_REPLICAS
from popdist._process_info import DistributedError as DistributedError
from popdist._process_info import ProcessInfo as _ProcessInfo
from popdist._process_info import env_int as _env_int
from popdist._process_info import process_info_from_args as _process_info_from_args
from popdist._process_info import process_info_from_env as _process_info_from_env

if TYPE_CHECKING:
    from popdist._process_group import ProcessGroup as _ProcessGroup
    from popdist._rpc_stats import RpcStats

_joined: _ProcessGroup | None = None


def init(
    processes: int | None = None, process: int | None = None, coordinator: str | None = None
) -> None:
    """Joins the group of the run's processes; does nothing for a single process or a second call.

    To be called before JAX starts its devices.

    Args:
        processes, process, coordinator: how many there are, which of them this is, from 0, and
            HOST:PORT of process 0, where they meet. Default: as the environment says.

    Raises:
        DistributedError: they do not fit together, a number in the environment is none, or the
            others do not come.
    """
    global _joined
    if _joined is not None:
        return
    if (processes, process, coordinator) == (None, None, None):
        info = _process_info_from_env()
    elif processes is None or process is None or coordinator is None:
        raise DistributedError(
            "processes, process and coordinator are given together or not at all"
        )
    else:
        info = _process_info_from_args(processes, process, coordinator)
    if info.count > 1:
        from popdist._process_group import ProcessGroup  # a single process does without

        _joined = ProcessGroup(info)


def isPopdistEnvSet() -> bool:  # noqa: N802 - popdist's name
    """True if the process was started as one of several instances."""
    return _NUM_INSTANCES in _os.environ or _process_info().count > 1


def getNumInstances() -> int:  # noqa: N802
    """Returns the number of processes of the run (world size)."""
    return _process_info().count


def getInstanceIndex() -> int:  # noqa: N802
    """Returns this process's index (rank), from 0."""
    return _process_info().index


def getNumTotalReplicas() -> int:  # noqa: N802
    """Returns the number of replicas of all processes (`POPDIST_NUM_TOTAL_REPLICAS`).

    Default: one replica per process.
    """
    return _env_int(_TOTAL_REPLICAS, getNumInstances())


def getNumLocalReplicas() -> int:  # noqa: N802
    """Returns this process's number of replicas; raises ValueError for an uneven division."""
    replicas, instances = getNumTotalReplicas(), getNumInstances()
    if replicas % instances:
        raise ValueError(f"{replicas} replicas cannot be shared equally by {instances} instances")
    return replicas // instances


def getNumIpusPerReplica() -> int:  # noqa: N802
    """Returns 1, the number of devices of a replica."""
    return 1


# ---- additions ----------------------------------------------------------------------------------
def all_gather_object(value: Any, channel: str = "main") -> list[Any]:
    """Gathers one JSON value from each process, in process order (collective).

    Args:
        value: something small that JSON can hold.
        channel: name of the sequence of calls; concurrent threads use one each.
    """
    return [value] if _joined is None else _joined.all_gather_object(value, channel)


def rpc_stats() -> dict[str, RpcStats]:
    """Returns count and bytes of this process's requests to the coordination service, by purpose.

    By purpose: "exchange" for collectives, "watch" for monitoring peers; empty for a single
    process.
    """
    return {} if _joined is None else _joined.rpc_stats()


def set_status(activity: str) -> None:
    """Publishes what this process is doing; other processes read it by `peer_status`.

    It reaches them within seconds.
    """
    if _joined is not None:
        _joined.activity = activity


def peer_status() -> dict[str, str]:
    """Returns the published activity of each other process, by "process I (pid P on HOST)"."""
    return {} if _joined is None else _joined.peer_status()


def local_process_count() -> int:
    """Returns the number of processes of the run on this host, this one included."""
    return 1 if _joined is None else _joined.local_process_count


def fail(message: str, exit_code: int) -> NoReturn:
    """Prints an error and exits this process, after which the run's other processes exit too.

    If several processes fail with the same text, only the first one prints it.
    """
    if _joined is None:
        _sys.stderr.write(f"{message}\n")
        exit_process(exit_code)
    _joined.fail(message, exit_code)


def collective_section() -> AbstractContextManager[None]:
    """Context for collective work: names a lost process and exits if that makes the work fail."""
    return nullcontext() if _joined is None else _joined.collective_section()


def shutdown() -> None:
    """Leaves the process group; called at exit if the program does not call it."""
    if _joined is not None:
        _joined.shutdown()


def exit_process(exit_code: int) -> NoReturn:
    """Exits this process at once, after a failure or on a signal.

    The other processes notice, and exit too.
    """
    if _joined is None:
        with _suppress(OSError):
            _sys.stdout.flush()
            _sys.stderr.flush()
        _os._exit(exit_code)
    _joined.exit_process(exit_code)


def _process_info() -> _ProcessInfo:
    if _joined is not None:
        return _ProcessInfo(_joined.index, _joined.count)
    return _process_info_from_env()
