"""How long a part of a program takes: the slowest of what it needs (a roofline).

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", 2009: each
resource alone gives a lower bound on the time, and with everything else hidden behind the slowest
one, the largest of them is the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import popxl
from planning.machines import Machine


@dataclass(frozen=True)
class Times:
    """Seconds that a part needs of each resource.

    Attributes:
        compute: matrix products and convolutions at the peak rate of the operands' type.
        memory: traffic of device memory.
        host: transfers from and to host memory; the directions go on at the same time.
        network: collectives, on links within a host or between hosts.
    """

    compute: float
    memory: float
    host: float
    network: float

    @property
    def bound(self) -> str:
        """The resource that decides."""
        return max(vars(self), key=vars(self).__getitem__)

    @property
    def seconds(self) -> float:
        """The largest time."""
        return max(vars(self).values())


def times(part: popxl.plan.Part, machine: Machine, dtype: str, replicas: int) -> Times:
    """Times of a part on a machine.

    Args:
        machine: as one of the replicas has it.
        dtype: type of the operands of products, of those that are not float8.
        replicas: devices that the program runs on.
    """
    return Times(
        compute=(part.flops - part.float8_flops) / machine.flops[dtype]
        + part.float8_flops / machine.flops.get("float8", machine.flops[dtype]),
        memory=part.device_traffic / machine.bandwidth,
        host=max(part.host_to_device, part.device_to_host) / machine.host_link,
        network=sum(c.sent / _link(c, machine, replicas) for c in part.collectives),
    )


def _link(collective: popxl.plan.Collective, machine: Machine, replicas: int) -> float:
    """The slowest link that a ring over a group uses, if neighbours share hosts."""
    span = collective.group_size if collective.consecutive else replicas
    return machine.link if machine.hosts(span) == 1 else machine.network
