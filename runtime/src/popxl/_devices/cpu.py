"""XLA's CPU backend: version check, virtual devices, compiler options, host arrays, launcher.

- JAX versions newer than the tested ones are refused: some were wrong on CPUs alone.
- Replicas are virtual devices; more of them need a restart of the backend.
- Compiler options depend on the ops of a program.
- Host and device share memory: XLA aliases host arrays, and the host sees XLA's arrays.
- Executables are launched from several threads, or with a limit on the unfinished ones.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, lru_cache, partial
from typing import Any

import jax
import numpy as np

from popxl._ir.log import logger
from popxl.errors import VersionError

# ---- versions -----------------------------------------------------------------------------------
_NEWEST = (0, 11, 2)  # that the tests have run with: newer ones have had new faults


def check_version() -> None:
    """Raises for a JAX newer than the versions that the tests have run with on a CPU.

    Raises:
        VersionError: JAX is too new.
    """
    if jax.__version_info__ > _NEWEST:
        newest = ".".join(map(str, _NEWEST))
        raise VersionError(
            f"JAX {jax.__version__} is installed, but on a CPU programs are not known to be right "
            f"with a JAX newer than {newest}: install jax<={newest}, or run on a GPU or TPU"
        )


# ---- virtual devices ----------------------------------------------------------------------------
_epoch = 0


def backend_epoch() -> int:
    """Returns the number of backend restarts; each restart invalidates all earlier executables."""
    return _epoch


def is_device_count_fixed() -> bool:
    """True if the user has set the number of virtual CPU devices in XLA_FLAGS."""
    return "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")


def request_devices(replicas: int) -> None:
    """Requests virtual CPU devices; has no effect once the backend runs.

    There is one for each processor that this process may use, at most 64, or for each replica. XLA
    has a thread for each processor or, if there are more, for each device, whether a program uses
    it or not: with more threads than processors a large product takes up to three times as long.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    processors = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    count = max(min(processors, 64), replicas)
    if is_device_count_fixed():
        return
    try:
        if jax.config.jax_num_cpu_devices < count:
            jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # the backend runs already


def restart_backend(count: int) -> list[Any]:
    """Restarts XLA's CPU backend with more devices; programs are compiled again on next use."""
    global _epoch
    from jax.extend import backend

    for array in jax.live_arrays():  # the backend must not go while it computes
        array.block_until_ready()
    logger.info("restarting the CPU backend with %d virtual devices", count)
    backend.clear_backends()
    _epoch += 1
    jax.config.update("jax_num_cpu_devices", count)
    return jax.devices("cpu")


# ---- compiling ----------------------------------------------------------------------------------
_LIBRARY = "xla_cpu_experimental_ynn_fusion_type"
COMPILER_OPTIONS: dict[str, Any] = {
    # YNNPACK fusions give wrong values for some multiply-reduce shapes (jax#39103, #40412).
    _LIBRARY: "",
}
_CONTROL_FLOW = re.compile(r"stablehlo\.(while|case|if)\b")
_PRODUCT = re.compile(r"stablehlo\.dot_general.*")
_FLOAT32_PRODUCT = re.compile(r": \(tensor<[\dx]*f32>, tensor<[\dx]*f32>\) -> tensor<[\dx]*f32>")


def compiler_options_for(stablehlo: str) -> dict[str, Any]:
    """Returns the compiler options that a CPU program needs besides `COMPILER_OPTIONS`."""
    options: dict[str, Any] = {}
    products = _PRODUCT.findall(stablehlo)
    if products and all(map(_FLOAT32_PRODUCT.search, products)):
        # YNNPACK's matrix products by themselves are right, and faster than Eigen's. Some of 16
        # bits fail when they run, so code with any of those gets none.
        options[_LIBRARY] = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
    if _CONTROL_FLOW.search(stablehlo):
        # Whole models, such as a loop that generates. The default order of kernels lets
        # independent ones run at once, and so makes all layers' weights ready in advance.
        options["xla_cpu_scheduler_type"] = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    else:
        # Saves copies of donated arrays that several kernels read. With loops it may overwrite
        # an array before a loop that reads it has run.
        options["xla_cpu_copy_insertion_use_region_analysis"] = True
    return options


# ---- memory -------------------------------------------------------------------------------------
def return_free_memory() -> None:
    """Returns free heap pages to the operating system (glibc's `malloc_trim`).

    glibc keeps what lies between blocks that are in use: after values were made and copied, some
    hundred megabytes that nothing of their size fits into later.
    """
    with suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


# ---- arrays -------------------------------------------------------------------------------------
_ADOPTED = 64  # bytes


def force_copy(x: np.ndarray) -> np.ndarray:
    """Returns an array's values in memory that XLA copies instead of aliasing.

    XLA adopts a host array that happens to lie on an `_ADOPTED` boundary, even if asked not to
    alias; adopted memory cannot be donated, so that the program would copy it instead.
    """
    x = np.asarray(x, order="C")
    if x.ctypes.data % _ADOPTED or not x.nbytes:
        return x
    memory = np.empty(x.nbytes + 2 * _ADOPTED, np.uint8)
    start = -memory.ctypes.data % _ADOPTED + x.dtype.itemsize
    out = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


def memory_view(array: jax.Array) -> np.ndarray:
    """Returns the bytes of an array of one device (uint8, no copy); the array must outlive them."""
    array.block_until_ready()
    if not array.nbytes:
        return np.empty(0, np.uint8)
    at = array.unsafe_buffer_pointer()
    return np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(at))


class BufferPool:
    """Pool of free device arrays, reused for remote-buffer entries that are read from disk."""

    def __init__(self, max_free_bytes: int) -> None:
        """Create a pool that keeps at most `max_free_bytes` of free arrays."""
        self._free: dict[tuple[Any, ...], list[jax.Array]] = defaultdict(list)
        self._max_free_bytes, self._nbytes, self._lock = max_free_bytes, 0, threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: Any, device: Any) -> jax.Array:
        """Returns an uninitialized device array, from the pool if one of this shape is free."""
        key = shape, np.dtype(dtype), device, _epoch
        with self._lock:
            if self._free[key]:
                array = self._free[key].pop()
                self._nbytes -= array.nbytes
                return array
        return _compile_empty_array(*key)().block_until_ready()

    def put_back(self, array: jax.Array) -> None:
        """Puts a device array back into the pool; running programs can still read it."""
        key = array.shape, array.dtype, array.device, _epoch
        # Starts when all that read the array are done, and is the same memory.
        reusable = _compile_donating_identity(*key)(array)
        with self._lock:
            if self._nbytes + reusable.nbytes <= self._max_free_bytes:
                self._nbytes += reusable.nbytes
                self._free[key].append(reusable)


@lru_cache(256)
def _compile_empty_array(shape: tuple[int, ...], dtype: np.dtype, device: Any, epoch: int) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(device)
    empty = jax.jit(partial(jax.lax.empty, shape, dtype), out_shardings=sharding)
    return empty.lower().compile()


@lru_cache(256)
def _compile_donating_identity(
    shape: tuple[int, ...], dtype: np.dtype, device: Any, epoch: int
) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(device)
    spec = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return jax.jit(lambda x: x, donate_argnums=0).lower(spec).compile()


# ---- launching ----------------------------------------------------------------------------------
_HELPERS = 2  # threads that launch by turns with the caller's
_WORTHWHILE = 4 * 2**20  # bytes: reading them takes longer than handing over a launch
_UNFINISHED = 8  # executables of a program of replicas


class CpuLauncher:
    """Launches the executables of a program on XLA's CPU backend.

    One replica: from several threads by turns. XLA runs what one thread launches one after the
    other, whether or not it depends on each other: cores that an executable leaves idle stay idle.
    What different threads launch is ordered by its data alone. So with n threads each executable
    waits for what it takes and for the n-th before it, and up to n run at a time.

    Several replicas: what one thread launches overlaps already, and only so much may be on its way.
    Collectives of replicas block a thread each, and starting a 33rd executable on a device blocks
    one too: with no thread left for the replica that all wait for, the program would stand still.
    Collectives of several processes (gloo) are told apart by their order alone, and would be mixed
    up: there one executable is on its way.
    """

    def __init__(self, replicas: int, processes: int) -> None:
        self._uses_threads = replicas == 1
        self._limit = 0 if processes > 1 else _UNFINISHED
        self._count = 0
        self._unfinished: deque[jax.Array] = deque()

    def __call__(
        self, executable: Any, arguments: Sequence[jax.Array], nbytes: int
    ) -> Sequence[jax.Array]:
        """Launches an executable on the arguments and returns its results.

        Args:
            nbytes: of arguments and results; small executables are launched by the calling thread.
        """
        if self._uses_threads:
            return self._launch_in_thread(executable, arguments, nbytes)
        results: Sequence[jax.Array] = executable(*arguments)
        if not self._limit:
            jax.block_until_ready(results)
        elif results:
            self._unfinished.append(results[0])
            if len(self._unfinished) > self._limit:
                oldest = self._unfinished.popleft()
                jax.block_until_ready(results[0] if oldest.is_deleted() else oldest)
        return results

    def _launch_in_thread(
        self, executable: Any, arguments: Sequence[jax.Array], nbytes: int
    ) -> Sequence[jax.Array]:
        if nbytes >= _WORTHWHILE:
            self._count += 1
            turn = self._count % (_HELPERS + 1)
            if turn:
                return _launch_threads()[turn - 1].submit(executable, *arguments).result()
        return executable(*arguments)

    def release_arrays(self) -> None:
        """Releases the arrays that the launcher keeps alive for running executables."""
        self._unfinished.clear()


@cache
def _launch_threads() -> list[ThreadPoolExecutor]:
    """Returns the threads that launch executables, shared by all programs of the process."""
    return [ThreadPoolExecutor(1, thread_name_prefix="popxl-launch") for _ in range(_HELPERS)]
