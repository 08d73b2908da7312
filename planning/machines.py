"""The hardware table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from config.errors import UserError, nearest

if TYPE_CHECKING:  # it takes seconds to import, and the names of machines are read before
    from popxl.plan import Rates

TABLE = Path(__file__).with_name("machines.yml")


@dataclass(frozen=True)
class Machine:
    """A kind of device, and the hosts it comes in. Rates are per second and of one direction.

    Attributes:
        flops: operations on operands of a type, of one device. Without float8, such products run
            at the rate of the others.
        memory, bandwidth: bytes of device memory, and bytes per second to and from it.
        host_link: bytes between a device and its host.
        link: bytes that a device sends to others of its host.
        devices: of a host; None: virtual ones, as many as are asked for, which divide its rates.
        host_memory: bytes of a host.
        network: bytes that a device sends to other hosts.
        platform: "gpu", "tpu" or "cpu", on which devices share the host's memory.
    """

    name: str
    title: str
    flops: Mapping[str, float]
    memory: float
    bandwidth: float
    host_link: float
    link: float
    devices: int | None
    host_memory: float
    network: float
    platform: str = "gpu"

    def hosts(self, replicas: int) -> int:
        """Hosts that so many devices take."""
        return 1 if self.devices is None else -(-replicas // self.devices)

    def for_replicas(self, replicas: int) -> Machine:
        """The machine as one of `replicas` devices has it."""
        if self.devices is not None:
            return self
        rates = ("bandwidth", "host_link", "link", "network", "memory")
        share = {name: getattr(self, name) / replicas for name in rates}
        return replace(self, flops={k: v / replicas for k, v in self.flops.items()}, **share)

    def rates(self, dtype: str, replicas: int) -> Rates:
        """Rates of one of `replicas` devices.

        Args:
            dtype: type of the operands of products, of those that are not float8.
        """
        from popxl.plan import Rates

        one = self.for_replicas(replicas)
        return Rates(
            flops=one.flops[dtype],
            float8_flops=one.flops.get("float8", one.flops[dtype]),
            bandwidth=one.bandwidth,
            host_link=one.host_link,
            link=one.link,
            network=one.network,
            devices=one.devices,
            replicas=replicas,
        )


@cache
def machines() -> Mapping[str, Machine]:
    """All machines of the table by name."""
    data = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {name: Machine(name, **facts) for name, facts in data.items()}


def machine(name: str) -> Machine:
    """The machine called `name`.

    Raises:
        UserError: there is none.
    """
    found = machines()
    if name not in found:
        raise UserError(f"--machine {name!r} is not in the hardware table{nearest(name, found)}")
    return found[name]
