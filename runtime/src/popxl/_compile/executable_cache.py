"""Executable cache on disk: a second start neither traces nor compiles.

There is one file for each segment, named by its cache key: a line of JSON (format, key, signature,
digest of the rest) and the executable as XLA serializes it. An invalid file is replaced.

Loading an executable runs it, so the folder must be as private as the program itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from popxl._compile.cache_folder import (
    PARTIAL_SUFFIX,
    SUFFIX,
    distrust_reason,
    folder_distrust_reason,
    max_cache_bytes,
    prune_cache,
)
from popxl._compile.cache_key import UncacheableError, segment_key
from popxl._compile.executable_serialization import (
    LoadedSegment,
    Specs,
    executable_signature,
    serialize_executable,
)
from popxl._ir.log import logger
from popxl._schedule.segment import Segment

if TYPE_CHECKING:
    from popxl._compile.compile_target import CompileTarget
    from popxl.ir import Ir

_FORMAT = "popxl executable 2"
_HEADER_LIMIT = 2**26  # bytes; a longer first line is none of ours
_VARIABLES = ("POPXL_CACHE_DIR", "POPART_CACHE_DIR")
_unwritable: set[Path] = set()
"""Folders that could not be written: the first segment warns for all."""


@dataclass
class CacheStatistics:
    """Cache hits, misses, traces and compilations of this process.

    Attributes:
        hits: executables loaded from the cache.
        misses: segments looked for in the cache and not found.
        traces: segments traced by JAX.
        compiles: segments compiled by XLA.
    """

    hits: int = 0
    misses: int = 0
    traces: int = 0
    compiles: int = 0


statistics = CacheStatistics()


@dataclass(frozen=True)
class StartupStats:
    """Time, traces and compilations of creating a session.

    Attributes:
        seconds: wall-clock time.
        from_cache: whether the executable was loaded from the cache (`POPXL_CACHE_DIR`).
        traces: how often JAX traced the program; 0 if it came from the cache.
        compiles: how often XLA compiled it; 0 if it came from the cache.
    """

    seconds: float
    from_cache: bool
    traces: int
    compiles: int


class StartupTimer:
    """Measures the `StartupStats` of a session, from the timer's creation.

    It reads the counters of the process: sessions created at once in several threads are counted
    with each other.
    """

    def __init__(self) -> None:
        self._at_start = replace(statistics)
        self._start = time.perf_counter()

    def elapsed_stats(self) -> StartupStats:
        """Returns the session's startup time, traces and compilations so far."""
        return StartupStats(
            seconds=time.perf_counter() - self._start,
            from_cache=statistics.hits > self._at_start.hits,
            traces=statistics.traces - self._at_start.traces,
            compiles=statistics.compiles - self._at_start.compiles,
        )


class SegmentCache:
    """Loads or compiles the segments of one program; thread-safe."""

    def __init__(self, program: CompileTarget) -> None:
        self._program = program
        self._folder = _folder_if_trusted(cache_folder(program.ir))
        self._max_bytes = max_cache_bytes()
        self._lock = Lock()

    def key(self, segment: Segment) -> str:
        """Returns the cache key of a segment; an uncacheable segment gets a unique one."""
        try:
            return segment_key(self._program, segment)
        except UncacheableError as reason:
            logger.info("segment %s is not cached: %s", segment.name, reason)
            return f"uncacheable {id(segment)}"

    def load(self, segment: Segment) -> Any | None:
        """Loads the executable of a segment from the cache; None if it is not there."""
        path, key = self._path_and_key(segment)
        if path is None:
            return None
        devices = list(self._program.mesh.devices.flat)
        return _load_executable(self._program.specs_of(segment), devices, path, key)

    def compile(self, segment: Segment) -> Any:
        """Compiles a segment and stores its executable in the cache."""
        path, key = self._path_and_key(segment)
        compiled = self._compile(segment)
        if path is not None:
            self.increment_counter("misses")
            _store_executable(self._program.specs_of(segment), compiled, path, key, self._max_bytes)
        return compiled

    def _path_and_key(self, segment: Segment) -> tuple[Path | None, str]:
        key = self.key(segment)
        is_cacheable = self._folder is not None and not key.startswith("uncacheable")
        return (self._folder / f"{key}{SUFFIX}" if self._folder and is_cacheable else None), key

    def _compile(self, segment: Segment) -> Any:
        from popxl._compile.segment_function import lower_segment
        from popxl._compile.xla_compile import compile_lowered

        start = time.perf_counter()
        program = self._program
        self.increment_counter("traces")
        lowered = lower_segment(segment, program.mesh, program.specs_of(segment)[0])
        self.increment_counter("compiles")
        compiled = compile_lowered(lowered, program.platform.name)
        logger.info("compiled %s in %.2f s", segment.name, time.perf_counter() - start)
        return compiled

    def increment_counter(self, counter: str) -> None:
        """Increments one of this process's cache `statistics` (hits, misses, ...)."""
        with self._lock:
            setattr(statistics, counter, getattr(statistics, counter) + 1)


def cache_folder(ir: Ir) -> Path | None:
    """Returns the folder of the executable cache; None if there is no cache.

    `POPXL_CACHE_DIR`, `POPART_CACHE_DIR`, or the session option `cachePath` if
    `enableEngineCaching` is set.
    """
    for variable in _VARIABLES:
        if os.environ.get(variable):
            return Path(os.path.expanduser(os.environ[variable]))
    options = ir._pb_ir.getSessionOptions()
    if options.enableEngineCaching and options.cachePath:
        return Path(options.cachePath)
    return None


def _folder_if_trusted(folder: Path | None) -> Path | None:
    """Returns the cache folder; None, with a warning, if another user can write to it."""
    reason = None if folder is None else folder_distrust_reason(folder)
    if reason is None:
        return folder
    logger.warning("the cache of executables in %s is not used: %s", folder, reason)
    return None


# ---- files --------------------------------------------------------------------------------------
class _InvalidCacheFile(Exception):
    """A cache file that is damaged, of another format or of another segment."""


def _load_executable(
    specs: Specs, devices: list[Any], path: Path, key: str
) -> LoadedSegment | None:
    start = time.perf_counter()
    try:
        with path.open("rb") as file:
            if reason := distrust_reason(os.fstat(file.fileno())):
                raise _InvalidCacheFile(reason)
            payload = _read_payload(file, specs, key)
        loaded = LoadedSegment(specs, devices, payload)
        with suppress(OSError):  # it may belong to somebody else
            os.utime(path)
    except FileNotFoundError:
        return None
    except Exception as reason:  # XLA raises what it likes for bytes it does not like
        logger.warning(
            "ignoring the cached executable %s, which will be replaced: %s", path, reason
        )
        return None
    logger.info("loaded executable from cache in %.2f s", time.perf_counter() - start)
    return loaded


def _read_payload(file: Any, specs: Specs, key: str) -> bytes:
    try:
        header = json.loads(file.readline(_HEADER_LIMIT))
    except ValueError as error:
        raise _InvalidCacheFile("its header is damaged") from error
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise _InvalidCacheFile(f"its format is not {_FORMAT!r}")
    if header.get("key") != key or header.get("signature") != executable_signature(specs):
        raise _InvalidCacheFile("it belongs to another segment")
    payload = file.read()
    if hashlib.sha256(payload).hexdigest() != header.get("sha256"):
        raise _InvalidCacheFile("its contents are damaged")
    return payload


def _store_executable(specs: Specs, compiled: Any, path: Path, key: str, max_bytes: float) -> None:
    """Writes an executable atomically, then prunes the folder to its limit.

    Args:
        max_bytes: bytes of all files.
    """
    try:
        payload = serialize_executable(specs, compiled)
        header = {
            "format": _FORMAT,
            "key": key,
            "sha256": hashlib.sha256(payload).hexdigest(),
            "signature": executable_signature(specs),
        }
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".", suffix=PARTIAL_SUFFIX, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(json.dumps(header).encode() + b"\n")
                file.write(payload)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        prune_cache(path.parent, max_bytes)
    except Exception as reason:  # a cache that cannot be written must not stop the program
        level = logging.INFO if path.parent in _unwritable else logging.WARNING
        logger.log(level, "the executable was not cached in %s: %s", path.parent, reason)
        _unwritable.add(path.parent)
        return
    logger.info("cached the executable: %s, %.1f MiB", path, len(payload) / 2**20)
