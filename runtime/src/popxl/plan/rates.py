"""Rates and latencies of a device, of its host link, and of its links to other devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from popxl.plan.records import Collective, Kernel


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Achieved rates of one of `replicas` devices; bandwidths in bytes per second and direction.

    Attributes:
        flops, float8_flops: operations per second of matrix products, of float8 operands and of
            others.
        attention: operations per second of fused attention, forward and backward, by head
            dimension; larger dimensions take the largest one; empty: as other products.
        bandwidth: device memory.
        host_link: between device and host.
        both_ways: host link in each direction, while both are used; default: `host_link`.
        link: to other devices of the host.
        network: to devices of other hosts.
        devices: devices of a host; None: all.
        replicas: devices that the program runs on.
        has_own_memory: true if devices have memory of their own; else loads take no time.
        disk_read, disk_write: the host's disk.
        host_copy: copies in host memory between disk buffers and the entries of devices with memory
            of their own.
        accumulate_exposed: fraction of an accumulator's memory time that a fused product does not
            hide: 0.5 to 0.6 of large ones, more of small ones (cublasLt on an H200).
        kernel_gap_s: seconds between two kernels.
        copy_latency_s: seconds of a transfer besides its bytes.
        dispatch_s: seconds of the host to dispatch an executable.
        kernel_launch_s: seconds of the host for each of its kernels.
        transfer_dispatch_s: seconds of the host to dispatch a transfer of one or more arrays.
        per_array_s: seconds of the host for each of its arrays.
        max_in_flight: largest number of executions that are dispatched ahead of the device.
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

    def matmul_seconds(self, flops: float, float8_flops: float = 0) -> float:
        """Returns the seconds of matmuls of `flops` FLOPs, which include `float8_flops`."""
        return (flops - float8_flops) / self.flops + float8_flops / self.float8_flops

    def kernel_seconds(self, counts: Mapping[Kernel, int]) -> float:
        """Returns the seconds of kernels that run one after another."""
        return sum(count * self._single_kernel_seconds(kernel) for kernel, count in counts.items())

    def _single_kernel_seconds(self, kernel: Kernel) -> float:
        """Returns the seconds of one kernel: the longer of its compute and memory traffic."""
        rate = self.float8_flops if kernel.float8 else self.flops
        if kernel.attention and self.attention:
            size = min((n for n in self.attention if n >= kernel.attention), default=None)
            rate = self.attention[size or max(self.attention)][kernel.backward]
        computes = kernel.flops / rate + self.accumulate_exposed * kernel.added / self.bandwidth
        return max(computes, kernel.nbytes / self.bandwidth) + self.kernel_gap_s

    def transfer_seconds(self, nbytes: int, both_ways: bool = False) -> float:
        """Returns the seconds of a transfer between host and device.

        Args:
            both_ways: true if another transfer uses the opposite direction.
        """
        rate = self.both_ways if both_ways and self.both_ways else self.host_link
        return self.copy_latency_s + nbytes / rate

    def collective_seconds(self, collectives: Iterable[Collective]) -> float:
        """Returns the seconds of collectives as rings, each at its slowest link's rate."""
        return sum(c.sent / self._link_rate(c) for c in collectives)

    def _link_rate(self, collective: Collective) -> float:
        span = collective.group_size if collective.consecutive else self.replicas
        return self.link if self.devices is None or span <= self.devices else self.network
