"""The names of popdist that programs use: who this process is in a distributed run.

The environment is read from `POPDIST_NUM_INSTANCES`, `POPDIST_INSTANCE_INDEX` and
`POPDIST_NUM_TOTAL_REPLICAS`. A value that is no number raises ValueError.
"""

from __future__ import annotations

import os

_INSTANCES = "POPDIST_NUM_INSTANCES"


def isPopdistEnvSet() -> bool:  # noqa: N802 - popdist's name
    """Whether the process was started as one of several instances."""
    return _INSTANCES in os.environ


def getNumInstances() -> int:  # noqa: N802
    """Number of processes of the run."""
    return _number(_INSTANCES, 1)


def getInstanceIndex() -> int:  # noqa: N802
    """Which of them this is, from 0."""
    return _number("POPDIST_INSTANCE_INDEX", 0)


def getNumTotalReplicas() -> int:  # noqa: N802
    """Replicas of all instances; default: one for each instance."""
    return _number("POPDIST_NUM_TOTAL_REPLICAS", getNumInstances())


def getNumLocalReplicas() -> int:  # noqa: N802
    """Replicas of this instance. Raises ValueError if instances do not share them equally."""
    replicas, instances = getNumTotalReplicas(), getNumInstances()
    if replicas % instances:
        raise ValueError(f"{replicas} replicas cannot be shared equally by {instances} instances")
    return replicas // instances


def getNumIpusPerReplica() -> int:  # noqa: N802
    """Always 1: a replica is one device."""
    return 1


def _number(variable: str, default: int) -> int:
    value = os.environ.get(variable, "")
    if not value:
        return default
    if not value.isdecimal():
        raise ValueError(f"the environment variable {variable} is {value!r}: set it to a number")
    return int(value)
