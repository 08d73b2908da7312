"""What differs between the platforms that programs run on, as one object for each.

Nothing else in the engine asks which platform it is. What ops are traced to differs as well:
`popxl.ops._reductions.traced_platform` tells them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from popxl._devices import cpu
from popxl._schedule.lookahead import upcoming, window_of
from popxl._storage.buffer_storage import put_apart, put_together
from popxl._storage.in_place_mover import Direct
from popxl._storage.load_preview import loads_ahead
from popxl._storage.prefetch import Transit

if TYPE_CHECKING:
    import jax

    from popxl._schedule.lookahead import Fetched
    from popxl._schedule.schedule import Routine, Schedule
    from popxl._storage.buffer_storage import Entries
    from popxl._storage.in_place_mover import InFlight
    from popxl.remote_buffer import RemoteBuffer

_DETERMINISTIC = "xla_gpu_exclude_nondeterministic_ops"
_CUDA_GRAPHS = "xla_gpu_enable_command_buffer"


class Platform:
    """A platform whose devices have memory of their own.

    Attributes:
        name: JAX's.
        host_memory: JAX's kind of memory that entries of remote buffers live in; "device", where
            host and device share it: then a load is no copy.
        switches: compiler options of all programs.
        put: moves arrays between memories, all one way.
    """

    name = "tpu"
    host_memory = "pinned_host"
    switches: ClassVar[dict[str, Any]] = {}
    put = staticmethod(put_together)

    def check(self) -> None:
        """Refuse to run where programs are known to be wrong."""

    def options(self, lowered: jax.stages.Lowered) -> dict[str, Any]:
        """Compiler options of a program."""
        return dict(self.switches)

    def launcher(self, replicas: int, processes: int) -> Launcher | cpu.Launcher:
        """Launches the executables of a program."""
        return Launcher()

    def look_at(self, schedule: Schedule, window: int | None) -> None:
        """Note in a schedule how far ahead of their use its entries move: within a window of bytes;
        None: two layers' entries."""
        if self.host_memory != "device":
            schedule.window, schedule.preview = window or window_of(schedule), loads_ahead

    def moving(
        self,
        window: int | None,
        main: Routine,
        fetched: Fetched,
        entries: Mapping[RemoteBuffer, Entries],
        in_flight: InFlight,
    ) -> Direct | Transit:
        """Moves the entries of a run.

        Args:
            window: see `Transit`; None: they need not move.
        """
        if window is None:
            return Direct(entries, in_flight)
        return Transit(upcoming(main, fetched.followed()), entries, self.put, window)


class Launcher:
    """Launches executables at once; see `popxl._devices.cpu.Launcher`."""

    def __call__(
        self, executable: Any, arguments: Sequence[jax.Array], nbytes: int
    ) -> Sequence[jax.Array]:
        results: Sequence[jax.Array] = executable(*arguments)
        return results

    def settle(self) -> None:
        """Nothing is held."""


class Gpu(Platform):
    """NVIDIA's and AMD's."""

    name = "gpu"
    switches: ClassVar[dict[str, Any]] = {
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
    put = staticmethod(put_apart)

    def options(self, lowered: jax.stages.Lowered) -> dict[str, Any]:
        options = super().options(lowered)
        # XLA records graphs anew where addresses change, as those of entries do in each call
        # (openxla/xla#35315).
        if _CUDA_GRAPHS not in os.environ.get("XLA_FLAGS", ""):
            options[_CUDA_GRAPHS] = ""
        if "stablehlo.select_and_scatter" in lowered.as_text():
            # The gradient of max pooling, which XLA does not compile with it.
            options[_DETERMINISTIC] = False
        return options


class Cpu(Platform):
    """The host itself: see `popxl._devices.cpu`."""

    name = "cpu"
    host_memory = "device"
    switches: ClassVar[dict[str, Any]] = cpu.SWITCHES
    check = staticmethod(cpu.check_version)

    def options(self, lowered: jax.stages.Lowered) -> dict[str, Any]:
        return super().options(lowered) | cpu.switches_for(lowered.as_text())

    def launcher(self, replicas: int, processes: int) -> cpu.Launcher:
        return cpu.Launcher(replicas, processes)


def platform_named(name: str) -> Platform:
    """The platform that JAX knows as "cpu", "gpu", "cuda", "rocm" or "tpu"."""
    return _PLATFORMS[name]


_GPU = Gpu()
_PLATFORMS = {"cpu": Cpu(), "gpu": _GPU, "cuda": _GPU, "rocm": _GPU, "tpu": Platform()}
