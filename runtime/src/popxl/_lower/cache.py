"""Executables on disk: a second start neither traces nor compiles.

One file for each program, named by the digest of everything that determines it. A file is a line
of JSON (format, key, signature, digest of what follows) and the executable as XLA serialises it. A
file that does not fit in any way is replaced.

Loading an executable runs it: the folder must be as private as the program itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from popxl._lower.executable import LoadedProgram, serialize, signature
from popxl._lower.fingerprint import Uncacheable, program_key

if TYPE_CHECKING:
    from popxl._lower.program import Program
    from popxl.ir import Ir

logger = logging.getLogger("popxl")

_FORMAT = "popxl executable 1"
_HEADER_LIMIT = 2**26  # bytes; a longer first line is none of ours
_VARIABLES = ("POPXL_CACHE_DIR", "POPART_CACHE_DIR")


@dataclass
class Statistics:
    """What sessions of this process did, counted.

    Attributes:
        hits: executables loaded from the cache.
        misses: programs looked for in the cache and not found.
        traces: programs traced by JAX.
        compiles: programs compiled by XLA.
    """

    hits: int = 0
    misses: int = 0
    traces: int = 0
    compiles: int = 0


statistics = Statistics()


def load_or_compile(program: Program) -> Any:
    """The executable of a program, from the cache if there is one and it is there."""
    folder = cache_folder(program.ir)
    if folder is None:
        return _compile(program)
    try:
        key = program_key(program)
    except Uncacheable as reason:
        logger.info("the program is not cached: %s", reason)
        return _compile(program)
    path = folder / f"{key}.popxl"
    loaded = _load(program, path, key)
    if loaded is not None:
        statistics.hits += 1
        return loaded
    statistics.misses += 1
    compiled = _compile(program)
    _store(program, compiled, path, key)
    return compiled


def cache_folder(ir: Ir) -> Path | None:
    """`POPXL_CACHE_DIR`, else `POPART_CACHE_DIR`, else the session option `cachePath` if
    `enableEngineCaching` is set, else None: no cache."""
    for variable in _VARIABLES:
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    options = ir._pb_ir.getSessionOptions()
    if options.enableEngineCaching and options.cachePath:
        return Path(options.cachePath)
    return None


def _compile(program: Program) -> Any:
    start = time.perf_counter()
    compiled = program.compile()
    logger.info("compiled the program in %.2f s", time.perf_counter() - start)
    return compiled


# ---- files --------------------------------------------------------------------------------------
class _Unusable(Exception):
    """The file is not what its name promises."""


def _load(program: Program, path: Path, key: str) -> LoadedProgram | None:
    start = time.perf_counter()
    try:
        with path.open("rb") as file:
            payload = _payload(file, program, key)
        loaded = LoadedProgram(program, payload)
    except FileNotFoundError:
        return None
    except Exception as reason:  # XLA raises what it likes for bytes it does not like
        logger.warning(
            "ignoring the cached executable %s, which will be replaced: %s", path, reason
        )
        return None
    logger.info("loaded executable from cache in %.2f s", time.perf_counter() - start)
    return loaded


def _payload(file: Any, program: Program, key: str) -> bytes:
    try:
        header = json.loads(file.readline(_HEADER_LIMIT))
    except ValueError as error:
        raise _Unusable("its header is damaged") from error
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise _Unusable(f"its format is not {_FORMAT!r}")
    if header.get("key") != key or header.get("signature") != signature(program):
        raise _Unusable("it belongs to another program")
    payload = file.read()
    if hashlib.sha256(payload).hexdigest() != header.get("sha256"):
        raise _Unusable("its contents are damaged")
    return payload


def _store(program: Program, compiled: Any, path: Path, key: str) -> None:
    """Write the file in one step: readers see all of it or nothing."""
    try:
        payload = serialize(program, compiled)
        header = {
            "format": _FORMAT,
            "key": key,
            "sha256": hashlib.sha256(payload).hexdigest(),
            "signature": signature(program),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(json.dumps(header).encode() + b"\n")
                file.write(payload)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except Exception as reason:  # a cache that cannot be written must not stop the program
        logger.warning("the executable was not cached in %s: %s", path.parent, reason)
        return
    logger.info("cached the executable: %s, %.1f MiB", path, len(payload) / 2**20)
