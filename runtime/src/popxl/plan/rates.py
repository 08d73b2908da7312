"""How fast a device is, and what links it to its host and to other devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from popxl.plan.records import Collective


@dataclass(frozen=True, kw_only=True)
class Rates:
    """A device as one of `replicas` has it: rates per second and of one direction, in bytes unless
    it says otherwise.

    Attributes:
        flops, float8_flops: operations of matrix products, of float8 operands and of others.
        bandwidth: of device memory.
        host_link: between device and host.
        link: to other devices of the host.
        network: to devices of other hosts.
        devices: of a host; None: all.
        replicas: devices that the program runs on.
        apart: whether devices have memory of their own; where they have not, loads take no time.
        disk_read, disk_write: of the host's disk.
        copy: seconds that a transfer takes besides its bytes.
        run: seconds of the host to dispatch an executable.
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
    devices: int | None = None
    replicas: int = 1
    apart: bool = True
    disk_read: float = 3e9
    disk_write: float = 1.5e9
    copy: float = 10e-6
    run: float = 40e-6
    put: float = 60e-6
    put_array: float = 41e-6
    enqueued: int = 32

    def compute(self, flops: float, float8_flops: float = 0) -> float:
        """Seconds of matrix products, `float8_flops` among them."""
        return (flops - float8_flops) / self.flops + float8_flops / self.float8_flops

    def exchange(self, collectives: Iterable[Collective]) -> float:
        """Seconds of collectives, each on the slowest link that a ring over its group uses, if
        neighbours share hosts."""
        return sum(c.sent / self._link(c) for c in collectives)

    def _link(self, collective: Collective) -> float:
        span = collective.group_size if collective.consecutive else self.replicas
        return self.link if self.devices is None or span <= self.devices else self.network
