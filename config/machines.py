"""The hardware table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from config.errors import UserError, nearest
from files.shown import shown, shown_name

if TYPE_CHECKING:  # it takes seconds to import, and the names of machines are read first
    from popxl.plan import Rates

TABLE = Path(__file__).with_name("machines.yml")
_RATES = ("memory", "bandwidth", "host_link", "link", "network", "disk_read", "disk_write")
_OF_HOST = ("host_memory", "disk")


@dataclass(frozen=True)
class Machine:
    """A kind of device, and the hosts it comes in. Rates are per second, in one direction.

    Attributes:
        flops: operations on operands of a type, of one device. Without float8, such products run
            at the rate of the others.
        memory, bandwidth: bytes of device memory, and bytes per second to and from it.
        host_link: bytes between a device and its host.
        link: bytes that a device sends to others of its host.
        devices: of a host; None: virtual ones, as many as are asked for, which divide its rates.
        host_memory: bytes of a host.
        network: bytes that a device sends to other hosts.
        disk: bytes of a host's local disk, of which `disk_read` and `disk_write` per second.
        platform: "gpu", "tpu" or "cpu", on which devices share the host's memory.
        kind: what the platform calls the device, where that is not the machine's name.
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
    disk: float = 1e12
    disk_read: float = 3e9
    disk_write: float = 1.5e9
    platform: str = "gpu"
    kind: str = ""

    def check(self) -> None:
        """Raise ValueError if a field has a value that no machine can have."""
        if "float32" not in self.flops or not {"float16", "bfloat16"} <= set(self.flops):
            raise ValueError("flops must have the rates of float32, float16 and bfloat16")
        if self.platform not in ("gpu", "tpu", "cpu"):
            raise ValueError(f"platform must be gpu, tpu or cpu, not {self.platform!r}")
        rates = {f"flops.{name}": rate for name, rate in self.flops.items()}
        rates |= {name: getattr(self, name) for name in (*_RATES, *_OF_HOST)}
        for name, rate in rates.items():
            if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not rate > 0:
                raise ValueError(f"{name} must be a number above 0, not {rate!r}")
        if self.devices is not None and not (type(self.devices) is int and self.devices > 0):
            raise ValueError(f"devices must be a whole number above 0, not {self.devices!r}")

    def is_kind(self, kind: str) -> bool:
        """Whether a platform that calls a device `kind` has this machine's, such as "NVIDIA H100
        80GB HBM3"."""
        words = re.split(r"[^A-Z0-9]+", kind.upper())
        names = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, i + 4)}
        return re.sub("[^A-Z0-9]", "", (self.kind or self.name).upper()) in names

    def hosts(self, replicas: int) -> int:
        """Hosts that so many devices take."""
        return 1 if self.devices is None else -(-replicas // self.devices)

    def for_replicas(self, replicas: int) -> Machine:
        """One of `replicas` devices' share of the machine."""
        if self.devices is not None:
            return self
        share = {name: getattr(self, name) / replicas for name in _RATES}
        return replace(self, flops={k: v / replicas for k, v in self.flops.items()}, **share)

    def rates(self, dtype: str, replicas: int) -> Rates:
        """Rates of one of `replicas` devices.

        Args:
            dtype: type of the operands of products, of those that are not float8.
        """
        from popxl.plan import Rates

        one = self.for_replicas(replicas)
        sharing = 1 if self.devices is None else min(replicas, self.devices)
        return Rates(
            flops=one.flops[dtype],
            float8_flops=one.flops.get("float8", one.flops[dtype]),
            bandwidth=one.bandwidth,
            host_link=one.host_link,
            link=one.link,
            network=one.network,
            devices=one.devices,
            replicas=replicas,
            apart=self.platform != "cpu",
            disk_read=one.disk_read / sharing,
            disk_write=one.disk_write / sharing,
        )


@cache
def machines() -> Mapping[str, Machine]:
    """All machines of the table by name."""
    data = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {name: Machine(name, **facts) for name, facts in data.items()}


def machine(name: str) -> Machine:
    """The machine called `name`, or that of a YAML file with the fields of one.

    Raises:
        UserError: there is none, or the file does not describe one.
    """
    if name.endswith((".yml", ".yaml")):
        return _described(Path(name))
    known = machines()
    if name not in known:
        raise UserError(
            f"--machine {shown(name)} is not in the hardware table{nearest(name, known)}; a YAML "
            "file can describe another (config/machines.yml shows how)"
        )
    return known[name]


def machine_of_kind(kind: str) -> Machine | None:
    """The machine whose device a platform calls `kind`."""
    return next((known for known in machines().values() if known.is_kind(kind)), None)


def _described(path: Path) -> Machine:
    """A machine of the user's own."""
    try:
        facts = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--machine: {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise UserError(f"--machine: {path} is not a YAML file") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("flops"), dict):
        raise UserError(
            f"--machine: {path} must have the fields of a machine (config/machines.yml)"
        )
    known = {field.name for field in fields(Machine)} - {"name"}
    for name in facts:
        if name not in known:
            raise UserError(
                f"--machine: {shown_name(path)} has no field {shown(name)}"
                f"{nearest(str(name), known)}"
            )
    needed = {f.name for f in fields(Machine) if f.default is MISSING} - {"name", "title"}
    if missing := sorted(needed - set(facts)):
        raise UserError(f"--machine: {path} lacks {', '.join(missing)} (config/machines.yml)")
    try:
        made = Machine(**{"name": path.stem, "title": path.stem, **facts})
        made.check()
    except ValueError as error:
        raise UserError(f"--machine: {path}: {error}") from None
    return made
