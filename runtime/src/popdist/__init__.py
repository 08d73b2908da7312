"""The names of popdist that programs use: who this process is in a distributed run.

The environment is read from `POPDIST_NUM_INSTANCES`, `POPDIST_INSTANCE_INDEX` and
`POPDIST_NUM_TOTAL_REPLICAS`.
"""

from __future__ import annotations

import os


def isPopdistEnvSet() -> bool:  # noqa: N802 - popdist's name
    """Whether the process was started as one of several instances."""
    return "POPDIST_NUM_INSTANCES" in os.environ


def getNumInstances() -> int:  # noqa: N802
    return int(os.environ.get("POPDIST_NUM_INSTANCES", "1"))


def getInstanceIndex() -> int:  # noqa: N802
    return int(os.environ.get("POPDIST_INSTANCE_INDEX", "0"))


def getNumTotalReplicas() -> int:  # noqa: N802
    return int(os.environ.get("POPDIST_NUM_TOTAL_REPLICAS", "1"))


def getNumLocalReplicas() -> int:  # noqa: N802
    return getNumTotalReplicas() // getNumInstances()


def getNumIpusPerReplica() -> int:  # noqa: N802
    return 1
