"""How fast a device is, and what links it to its host and to other devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from popxl.plan.records import Collective, Kernel


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device reaches, as one of `replicas` has it: rates per second and of one direction, in
    bytes unless it says otherwise.

    Attributes:
        flops, float8_flops: operations of matrix products, of float8 operands and of others.
        attention: of attention as one kernel, forwards and backwards, by features of a head; where
            there is none as large, the largest counts; none at all: as other products.
        bandwidth: of device memory.
        host_link: between device and host.
        both_ways: each way, while both are used; default: `host_link`.
        link: to other devices of the host.
        network: to devices of other hosts.
        devices: of a host; None: all.
        replicas: devices that the program runs on.
        apart: whether devices have memory of their own; where they have not, loads take no time.
        disk_read, disk_write: of the host's disk.
        host_copy: of host memory, between what the disk reads or writes and entries of devices with
            memory of their own.
        adding: the fraction of an accumulator's time that a product which adds to it does not hide:
            0.5 to 0.6 of large ones, more of small ones (cublasLt on an H200).
        gap: seconds between two kernels.
        copy: seconds that a transfer takes besides its bytes.
        run: seconds of the host to dispatch an executable.
        launch: and for each kernel of it.
        put: seconds of the host to dispatch a transfer of one or more arrays.
        put_array: and for each array of it.
        enqueued: executions that are dispatched ahead of the device at most.
    """

    flops: float
    float8_flops: float
    bandwidth: float
    host_link: float
    link: float
    network: float
    both_ways: float | None = None
    devices: int | None = None
    replicas: int = 1
    has_own_memory: bool = True
    disk_read: float = 3e9
    disk_write: float = 1.5e9
    host_copy: float = 6.5e9
    attention: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    accumulate_exposed: float = 0.6
    kernel_gap_s: float = 2e-6
    copy_latency_s: float = 100e-6
    dispatch_s: float = 150e-6
    kernel_launch_s: float = 7e-6
    transfer_dispatch_s: float = 60e-6
    per_array_s: float = 41e-6
    max_in_flight: int = 32

    def product_seconds(self, flops: float, float8_flops: float = 0) -> float:
        """Seconds of matrix products, `float8_flops` among them."""
        return (flops - float8_flops) / self.flops + float8_flops / self.float8_flops

    def kernel_seconds(self, counts: Mapping[Kernel, int]) -> float:
        """Seconds of kernels, so many of each, one after the other."""
        return sum(count * self._kernel(kernel) for kernel, count in counts.items())

    def _kernel(self, kernel: Kernel) -> float:
        """Of what it computes and what it moves, the longer; products add to accumulators when they
        are done."""
        rate = self.float8_flops if kernel.float8 else self.flops
        if kernel.attention and self.attention:
            size = min((n for n in self.attention if n >= kernel.attention), default=None)
            rate = self.attention[size or max(self.attention)][kernel.backward]
        computes = kernel.flops / rate + self.accumulate_exposed * kernel.added / self.bandwidth
        return max(computes, kernel.nbytes / self.bandwidth) + self.kernel_gap_s

    def transfer_seconds(self, nbytes: int, both_ways: bool = False) -> float:
        """Seconds of a transfer between host and device, or of one while another goes the other
        way."""
        rate = self.both_ways if both_ways and self.both_ways else self.host_link
        return self.copy_latency_s + nbytes / rate

    def collective_seconds(self, collectives: Iterable[Collective]) -> float:
        """Seconds of collectives, each on the slowest link that a ring over its group uses, if
        neighbours share hosts."""
        return sum(c.sent / self._link(c) for c in collectives)

    def _link(self, collective: Collective) -> float:
        span = collective.group_size if collective.consecutive else self.replicas
        return self.link if self.devices is None or span <= self.devices else self.network
