"""Checks that all processes of a run have equal inputs, before its first step.

Processes that train on different things would go on silently, or wait for each other for days.
Their inputs are compared by digest; only what differs is sent in full.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import popdist
from config.base import flatten_by_path
from config.errors import ConfigError
from config.sections import RunConfig
from files.formatting import format_value

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("jax", "jaxlib", "numpy", "ml_dtypes", "safetensors", "tokenizers", "transformers")
_PLACES = {
    "checkpoint.load", "checkpoint.save", "data.train", "data.validation", "data.tokenizer",
}  # fmt: skip
"""Names of files and folders, which may differ between hosts; their contents are compared."""


def check_same_on_all_processes(values: Mapping[str, Any]) -> None:
    """Check that all processes have equal values; a collective operation.

    Args:
        values: JSON values, by name for messages.

    Raises:
        ConfigError: the values differ; the message names the first that does, and a process.
    """
    if popdist.getNumInstances() == 1:
        return
    local_json = {name: json.dumps(value, sort_keys=True) for name, value in values.items()}
    if len(set(popdist.all_gather_object(hash_json(sorted(local_json.items()))))) == 1:
        return
    # Most values are equal. Those that differ can be long, such as a template.
    hashes = popdist.all_gather_object(
        {name: hash_json([text]) for name, text in local_json.items()}
    )
    names = dict.fromkeys(name for one in hashes for name in one)
    name = next(n for n in names if len({one.get(n) for one in hashes}) > 1)
    displayed = popdist.all_gather_object([socket.gethostname(), format_value(values.get(name))])
    process = next(i for i, one in enumerate(hashes) if one.get(name) != hashes[0].get(name))
    (_, expected), (host, differing) = displayed[0], displayed[process]
    raise ConfigError(
        f"process {process} on {host[:30]} has {name} {differing}, but process 0 has {expected}: "
        "start all processes with the same program, settings and data"
    )


def check_same_run_on_all_processes(config: RunConfig, **extra: Any) -> None:
    """Check that all processes run the same sources, versions and configuration.

    Args:
        extra: more values to compare, by name.

    Raises:
        ConfigError: as `check_same_on_all_processes`.
    """
    if popdist.getNumInstances() > 1:
        versions = {f"version of {name}": metadata.version(name) for name in _PACKAGES}
        versions["version of Python"] = platform.python_version()
        versions["program"] = Path(sys.argv[0]).name
        settings = flatten_by_path(config.to_dict())
        values = {name: value for name, value in settings.items() if name not in _PLACES}
        check_same_on_all_processes(
            values | versions | extra | {"digest of the program's sources": _hash_source_files()}
        )


def hash_json(texts: Iterable[Any]) -> str:
    """Returns a hash of JSON values: the first 16 hexadecimal digits of SHA-256."""
    sha256 = hashlib.sha256()
    for text in texts:
        sha256.update(json.dumps(text).encode())
    return sha256.hexdigest()[:16]


@cache
def _hash_source_files() -> str:
    """Returns a SHA-256 hash of the source files of the application and the runtime."""
    sha256 = hashlib.sha256()
    for root in (_ROOT, Path(popdist.__file__).parents[1]):
        folders = [p for p in root.iterdir() if p.is_dir() and (p / "__init__.py").exists()]
        for path in sorted(p for folder in folders for p in folder.rglob("*.py")):
            sha256.update(f"{path.relative_to(root)}\n".encode())
            sha256.update(path.read_bytes())
    return sha256.hexdigest()[:16]
