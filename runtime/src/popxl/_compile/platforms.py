"""CPU, GPU and TPU: compiler options, host memory, launcher, and mover of remote-buffer entries.

No other module of the engine asks for the platform, except ops that are traced differently for
each: they call `popxl.ops._reductions.traced_platform`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from popxl._devices import cpu
from popxl._storage.shared_memory_mover import SharedMemoryMover

if TYPE_CHECKING:
    import jax
    from jax.sharding import NamedSharding

    from popxl._schedule.schedule import Routine, Schedule
    from popxl._schedule.schedule_walk import FetchedScalars
    from popxl._storage.buffer_storage import BufferStorage
    from popxl._storage.prefetch import PrefetchMover
    from popxl._storage.shared_memory_mover import InFlightArrays
    from popxl.remote_buffer import RemoteBuffer

_DETERMINISTIC = "xla_gpu_exclude_nondeterministic_ops"
_CUDA_GRAPHS = "xla_gpu_enable_command_buffer"


class Platform:
    """Base platform: devices with memory of their own, separate from host memory.

    Attributes:
        name: JAX's.
        host_memory: JAX's kind of memory that entries of remote buffers live in; "device", where
            host and device share it: then a load is no copy.
        compiler_options: compiler options of all programs.
    """

    name = "tpu"
    host_memory = "pinned_host"
    compiler_options: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def device_put(
        arrays: Sequence[jax.Array], shardings: Sequence[NamedSharding]
    ) -> list[jax.Array]:
        """Copies arrays between host and device memory, all one way."""
        from popxl._storage.device_put import device_put_batch

        return device_put_batch(arrays, shardings)

    def check_version(self) -> None:
        """Raises if this version of JAX is known to compute wrong results on the platform."""

    def compiler_options_for(self, lowered: jax.stages.Lowered) -> dict[str, Any]:
        """Returns the XLA compiler options for a lowered program."""
        return dict(self.compiler_options)

    def create_launcher(self, replicas: int, processes: int) -> DirectLauncher | cpu.CpuLauncher:
        """Returns the object that launches a program's executables on the platform."""
        return DirectLauncher()

    def set_prefetch_window(self, schedule: Schedule, window: int | None) -> None:
        """Sets a schedule's prefetch window in bytes; None: two layers' remote-buffer entries."""
        if self.host_memory != "device":
            from popxl._schedule.lookahead import default_prefetch_window
            from popxl._storage.load_preview import format_prefetch_counts

            schedule.window = window or default_prefetch_window(schedule)
            schedule.preview = format_prefetch_counts

    def make_mover(
        self,
        window: int | None,
        main: Routine,
        fetched: FetchedScalars,
        entries: Mapping[RemoteBuffer, BufferStorage],
        in_flight: InFlightArrays,
    ) -> SharedMemoryMover | PrefetchMover:
        """Returns the mover, which loads and stores the remote-buffer entries of a run.

        Args:
            window: see `PrefetchMover`; None: host and device share memory.
        """
        if window is None:
            return SharedMemoryMover(entries, in_flight)
        from popxl._schedule.lookahead import lookahead_events
        from popxl._storage.prefetch import PrefetchMover

        return PrefetchMover(
            lookahead_events(main, fetched.subscribe()), entries, self.device_put, window
        )


class DirectLauncher:
    """Launches executables immediately; see `popxl._devices.cpu.CpuLauncher`."""

    def __call__(
        self, executable: Any, arguments: Sequence[jax.Array], nbytes: int
    ) -> Sequence[jax.Array]:
        results: Sequence[jax.Array] = executable(*arguments)
        return results

    def release_arrays(self) -> None:
        """Does nothing, since this launcher keeps no arrays alive."""


class Gpu(Platform):
    """NVIDIA and AMD GPUs as a platform of compiled programs."""

    name = "gpu"
    compiler_options: ClassVar[dict[str, Any]] = {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # Scatters add in the order in which atomic operations happen to arrive, and cuDNN's
        # attention does so in its gradient: the same program would give other bits in each run.
        _DETERMINISTIC: True,
        # With Triton's products to choose from, XLA leaves cublasLt's by themselves: what adds them
        # to an accumulator, or adds a bias, would be a kernel of its own.
        "xla_gpu_enable_triton_gemm": False,
        # XLA would leave out a rounding to a half type, or to float8, between two ops that it
        # fuses: a layer computed again, in other fusions, would give other bits.
        "xla_allow_excess_precision": False,
    }

    @staticmethod
    def device_put(
        arrays: Sequence[jax.Array], shardings: Sequence[NamedSharding]
    ) -> list[jax.Array]:
        from popxl._storage.device_put import device_put_interleaved

        return device_put_interleaved(arrays, shardings)

    def compiler_options_for(self, lowered: jax.stages.Lowered) -> dict[str, Any]:
        options = super().compiler_options_for(lowered)
        # XLA records CUDA graphs again when addresses change, as those of entries do in each call
        # (openxla/xla#35315).
        if _CUDA_GRAPHS not in os.environ.get("XLA_FLAGS", ""):
            options[_CUDA_GRAPHS] = ""
        if "stablehlo.select_and_scatter" in lowered.as_text():
            # The gradient of max pooling, which XLA does not compile with it.
            options[_DETERMINISTIC] = False
        return options


class Cpu(Platform):
    """The host's CPU as a platform of virtual devices: see `popxl._devices.cpu`."""

    name = "cpu"
    host_memory = "device"
    compiler_options: ClassVar[dict[str, Any]] = cpu.COMPILER_OPTIONS
    check_version = staticmethod(cpu.check_version)

    def compiler_options_for(self, lowered: jax.stages.Lowered) -> dict[str, Any]:
        return super().compiler_options_for(lowered) | cpu.compiler_options_for(lowered.as_text())

    def create_launcher(self, replicas: int, processes: int) -> cpu.CpuLauncher:
        return cpu.CpuLauncher(replicas, processes)


def get_platform(name: str) -> Platform:
    """Returns the platform of one of JAX's names: "cpu", "gpu", "cuda", "rocm" or "tpu"."""
    return _PLATFORMS[name]


_GPU = Gpu()
_PLATFORMS = {"cpu": Cpu(), "gpu": _GPU, "cuda": _GPU, "rocm": _GPU, "tpu": Platform()}
