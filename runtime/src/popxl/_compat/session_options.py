"""Session options, which programs reach through `ir._pb_ir.getSessionOptions()`.

PopART's session options steer a compiler this runtime does not have. Attributes may be set and
read freely; setting one that has no meaning on XLA is mentioned once in the log.
"""

from __future__ import annotations

import os
from typing import Any

from popxl._ir.log import logger

SUPPORTED_OPTIONS = {
    "enableDistributedReplicatedGraphs",
    "enableReplicatedGraphs",
    "globalReplicationFactor",
    "partialsTypeMatMuls",
    "replicatedGraphCount",
    "cachePath",
    "enableEngineCaching",
    "enableStochasticRounding",
    "throwIfLog2ScaleTensorNotInRange",
    "logDir",
    "dotChecks",
}
_DEFAULTS: dict[str, Any] = {
    "aliasZeroCopy": False,
    "constantWeights": True,
    "enableEngineCaching": False,
    "cachePath": "",
    "enableStochasticRounding": False,
    "enableExplicitMainLoops": False,
    "enableDistributedReplicatedGraphs": False,
    "enableInplaceAmbiguityChecking": False,
    "enableReplicatedGraphs": False,
    "explicitRecomputation": False,
    "useHostCopyOps": False,
    "globalReplicaOffset": 0,
    "globalReplicationFactor": 1,
    "logDir": ".",
    "numIOTiles": 0,
    "partialsTypeMatMuls": "",
    "replicatedGraphCount": 1,
    "throwIfLog2ScaleTensorNotInRange": True,
    "virtualGraphMode": None,
}
_LOGGED: set[str] = set()


def _log_ignored(name: str) -> None:
    if name not in _LOGGED:
        _LOGGED.add(name)
        logger.info("session option %s has no effect on XLA; it is accepted and ignored", name)


class _EngineOptions(dict[str, str]):
    def __setitem__(self, key: str, value: str) -> None:
        _log_ignored(f"engineOptions[{key!r}]")
        super().__setitem__(key, value)


class SessionOptions:
    """Mutable options; a session reads them when it is created."""

    def __init__(self) -> None:
        object.__setattr__(self, "_values", dict(_DEFAULTS))
        self._values["engineOptions"] = _EngineOptions()
        self._values["dotChecks"] = set()

    _values: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        values = object.__getattribute__(self, "_values")
        if name not in values:
            values[name] = _EngineOptions() if name.endswith("Options") else None
        return values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in SUPPORTED_OPTIONS and value != _DEFAULTS.get(name):
            _log_ignored(name)
        self._values[name] = value


def requested_dot_checkpoints(options: SessionOptions) -> set[str]:
    """Returns the names (upper case) of the `ir.dot_checkpoint`s that write a DOT file."""
    names = {*options.dotChecks, *os.environ.get("POPART_DOT_CHECKS", "").split(":")}
    return {name.upper() for name in names} - {""}


class IrHandle:
    """Stand-in for PopART's Ir binding, with the few members that programs use."""

    def __init__(self, ir: Any) -> None:
        self._ir = ir
        self._options = SessionOptions()

    def getSessionOptions(self) -> SessionOptions:  # noqa: N802 - PopART's name
        return self._options

    def getAllGraphs(self) -> list[Any]:  # noqa: N802
        return list(self._ir._graphs)

    def getId(self) -> int:  # noqa: N802
        return self._ir.id

    def logIr(self) -> None:  # noqa: N802
        logger.info("%s", self._ir)
