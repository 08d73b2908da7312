"""Roofline model of a program's region: the seconds that each resource takes at its rate.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", 2009: each
resource alone gives a lower bound on the time, and with everything else hidden behind the slowest
one, the largest of them is the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import popxl


@dataclass(frozen=True)
class ResourceTimes:
    """Seconds that a program's region takes of each resource, from compute to disk.

    Attributes:
        compute: matrix products and convolutions at the peak rate of the operands' type.
        memory: traffic of device memory.
        host: transfers from and to host memory, both directions at the same time.
        network: collectives, on links within a host or between hosts.
        disk: reads and writes of entries on disk, one at a time.
    """

    compute: float
    memory: float
    host: float
    network: float
    disk: float = 0.0

    @property
    def bottleneck(self) -> str:
        """Name of the resource that takes the most seconds."""
        return max(vars(self), key=vars(self).__getitem__)

    @property
    def seconds(self) -> float:
        """Seconds of the slowest resource, the roofline's lower bound on time."""
        return max(vars(self).values())


def resource_times(region: popxl.plan.RegionCost, rates: popxl.plan.Rates) -> ResourceTimes:
    """Compute the seconds that a program's region takes of each resource of a device."""
    return ResourceTimes(
        compute=rates.matmul_seconds(region.flops, region.float8_flops),
        memory=region.device_traffic / rates.bandwidth,
        host=max(region.host_to_device, region.device_to_host) / rates.host_link,
        network=rates.collective_seconds(region.collectives),
        disk=region.disk_read / rates.disk_read + region.disk_written / rates.disk_write,
    )


def bound_seconds(regions: Iterable[popxl.plan.RegionCost], rates: popxl.plan.Rates) -> float:
    """Returns the seconds of all regions of a program, each bound by its slowest resource."""
    return sum(resource_times(region, rates).seconds for region in regions)
