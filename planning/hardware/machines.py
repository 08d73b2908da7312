"""The hardware table (machines.yml): memory and rates of known machines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from config.errors import UserError, did_you_mean
from files.formatting import format_name, format_value

if TYPE_CHECKING:  # it takes seconds to import, and the names of machines are read first
    from popxl.plan import Rates

TABLE = Path(__file__).with_name("machines.yml")
_TRANSFER_RATES = ("bandwidth", "host_link", "link", "network")
_RATES = ("memory", "bandwidth", "host_link", "link", "network", "disk_read", "disk_write")
_OF_HOST = ("host_memory", "disk")
TYPICAL_ACHIEVED = {
    "flops": 0.75,
    "attention": 0.5,  # of the products' (FlashAttention-2, arXiv:2307.08691: 50 to 73 %)
    "bandwidth": 0.88,
    "host_link": 0.86,
    "both_ways": 0.78,
    "link": 0.8,  # a ring over 8 H200: 82 % (Bekman, "Machine Learning Engineering", 2026-08)
    "network": 0.8,  # taken to be as good
}
"""Typical fractions of a data sheet's rates that programs achieve, where none are measured."""


@dataclass(frozen=True)
class Machine:
    """One entry of the hardware table: a device type and its host. Bandwidths are per direction.

    Attributes:
        flops: operations per second of one device by type of the operands. Without float8, such
            products run at the rate of the others.
        memory, bandwidth: bytes of device memory, and bytes per second to and from it.
        host_link: bytes per second between a device and its host.
        link: bytes per second that a device sends to others of its host.
        devices: devices of a host; None: any number of virtual ones, which divide its rates.
        host_memory: bytes of a host.
        network: bytes per second that a device sends to other hosts.
        disk: bytes of a host's local disk, of which `disk_read` and `disk_write` per second.
        one_memory: True if a device's memory is its host's, as of a DGX Spark: `memory` and
            `host_memory` are the same bytes.
        platform: "gpu", "tpu" or "cpu", on which devices share the host's memory.
        capability: NVIDIA's compute capability of the device; 0: it has none.
        kind: the platform's name of the device, where it is not the machine's name.
        achieved: rates that programs achieve, by the names of fields and of types; `both_ways`: of
            `host_link` in each direction at once. `TYPICAL_ACHIEVED` applies to the others.
        attention: operations per second that fused attention achieves, forward and backward, by
            head dimension.
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
    one_memory: bool = False
    platform: str = "gpu"
    capability: float = 0.0
    kind: str = ""
    achieved: Mapping[str, float] = field(default_factory=dict)
    attention: Mapping[int, Sequence[float]] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ValueError if a field of this entry has an impossible value."""
        if "float32" not in self.flops or not {"float16", "bfloat16"} <= set(self.flops):
            raise ValueError("flops must have the rates of float32, float16 and bfloat16")
        if self.platform not in ("gpu", "tpu", "cpu"):
            raise ValueError(f"platform must be gpu, tpu or cpu, not {self.platform!r}")
        rates = {f"flops.{name}": rate for name, rate in self.flops.items()}
        rates |= {name: getattr(self, name) for name in (*_RATES, *_OF_HOST)}
        rates |= self._check_achieved()
        if type(self.capability) not in (int, float) or not 0 <= self.capability < 100:
            raise ValueError(f"capability must be a number such as 9.0, not {self.capability!r}")
        for name, rate in rates.items():
            if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not rate > 0:
                raise ValueError(f"{name} must be a number above 0, not {rate!r}")
        if self.one_memory and (self.devices != 1 or self.memory != self.host_memory):
            raise ValueError("one_memory is of one device, whose memory is host_memory")
        if self.devices is not None and not (type(self.devices) is int and self.devices > 0):
            raise ValueError(f"devices must be a whole number above 0, not {self.devices!r}")

    def _check_achieved(self) -> dict[str, Any]:
        """Check the measured rates in `achieved` and `attention`, and return the former by name."""
        named = {*self.flops, *_TRANSFER_RATES, "both_ways"}
        if not isinstance(self.achieved, Mapping) or not named >= set(self.achieved):
            raise ValueError(f"achieved must have rates by these names: {', '.join(sorted(named))}")
        pairs = self.attention.items() if isinstance(self.attention, Mapping) else [(None, ())]
        if any(type(n) is not int or not isinstance(p, list) or len(p) != 2 for n, p in pairs):
            raise ValueError("attention must have two rates for each size: {64: [3e14, 2e14]}")
        rates = {f"achieved.{name}": rate for name, rate in self.achieved.items()}
        for size, pair in pairs:
            rates |= {f"attention.{size}": rate for rate in pair}
        return rates

    @property
    def target(self) -> str:
        """Hardware that programs are traced for, an argument of `popxl.plan.trace_program`."""
        return f"{self.platform} {self.capability}" if self.capability else self.platform

    @property
    def usable_bytes(self) -> float:
        """Bytes of device memory that a program may use."""
        from popxl.plan import MEMORY_FRACTION

        return self.memory if self.platform == "cpu" else self.memory * MEMORY_FRACTION

    def with_usable_bytes(self, nbytes: float) -> Machine:
        """Return a copy whose devices have `nbytes` of memory that a program may use."""
        return replace(self, memory=self.memory * nbytes / self.usable_bytes)

    def is_kind(self, kind: str) -> bool:
        """Return True if a JAX device kind, such as "NVIDIA H100 80GB HBM3", names this machine."""
        words = re.split(r"[^A-Z0-9]+", kind.upper())
        names = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, i + 4)}
        return re.sub("[^A-Z0-9]", "", (self.kind or self.name).upper()) in names

    def hosts(self, replicas: int) -> int:
        """Return the number of hosts with `replicas` devices."""
        return 1 if self.devices is None else -(-replicas // self.devices)

    def rates(self, dtype: str, replicas: int) -> Rates:
        """Return the data sheet's peak rates of one of `replicas` devices, for lower time bounds.

        Args:
            dtype: type of the operands of products that are not float8.
        """
        float8 = self.flops.get("float8", self.flops[dtype])
        peaks = {name: getattr(self, name) for name in _TRANSFER_RATES}
        return self._shared_rates(replicas, flops=self.flops[dtype], float8_flops=float8, **peaks)

    def achieved_rates(self, dtype: str, replicas: int) -> Rates:
        """Return the rates that programs achieve on one of `replicas` devices, for simulated runs.

        Arguments as for `rates`.
        """
        flops = self._achieved_rate(dtype, "flops", self.flops[dtype])
        float8 = flops
        if "float8" in self.flops:
            float8 = self._achieved_rate("float8", "flops", self.flops["float8"])
        achieved = {
            name: self._achieved_rate(name, name, getattr(self, name)) for name in _TRANSFER_RATES
        }
        attention = {size: (pair[0], pair[1]) for size, pair in self.attention.items()}
        usual = self.flops[dtype] * TYPICAL_ACHIEVED["attention"]
        return self._shared_rates(
            replicas,
            attention or {1: (usual, usual)},
            flops=flops,
            float8_flops=float8,
            both_ways=self._achieved_rate("both_ways", "both_ways", self.host_link),
            **achieved,
        )

    def _achieved_rate(self, name: str, kind: str, peak: float) -> float:
        """Return a resource's measured rate; unmeasured, the usual fraction of its peak rate."""
        return self.achieved.get(name, peak * TYPICAL_ACHIEVED[kind])

    def _shared_rates(
        self,
        replicas: int,
        attention: Mapping[int, tuple[float, float]] | None = None,
        **rates: float,
    ) -> Rates:
        """Return the rates of one of `replicas` devices; they divide what devices of a host share.

        Virtual devices share all of the machine's rates; the devices of a host share its
        disk.
        """
        from popxl.plan import Rates

        divisor = replicas if self.devices is None else 1
        per_host = min(replicas, self.devices or replicas)
        per_device = {name: rate / divisor for name, rate in rates.items()}
        return Rates(
            flops=per_device["flops"],
            float8_flops=per_device["float8_flops"],
            attention=attention or {},
            bandwidth=per_device["bandwidth"],
            host_link=per_device["host_link"],
            both_ways=per_device.get("both_ways"),
            link=per_device["link"],
            network=per_device["network"],
            devices=self.devices,
            replicas=replicas,
            has_own_memory=self.platform != "cpu",
            disk_read=self.disk_read / per_host,
            disk_write=self.disk_write / per_host,
        )


@cache
def machines() -> Mapping[str, Machine]:
    """Return all machines of the hardware table (machines.yml) by name."""
    data = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {name: Machine(name, **entry) for name, entry in data.items()}


def machine(name: str) -> Machine:
    """Return a machine of the hardware table by name, or of a YAML file by path.

    Raises:
        UserError: there is none, or the file does not describe one.
    """
    if name.endswith((".yml", ".yaml")):
        return _read_machine(Path(name))
    listed = machines()
    if name not in listed:
        raise UserError(
            f"--machine {format_value(name)} is not in the hardware table"
            f"{did_you_mean(name, listed)}; a YAML file can describe another "
            "(planning/hardware/machines.yml shows how)"
        )
    return listed[name]


def machine_for_device_kind(kind: str) -> Machine | None:
    """Return the machine of the hardware table for a JAX device kind; None if it is not listed."""
    return next((listed for listed in machines().values() if listed.is_kind(kind)), None)


def _read_machine(path: Path) -> Machine:
    """Parse a machine from a YAML file."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--machine: {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise UserError(f"--machine: {path} is not a YAML file") from None
    if not isinstance(data, dict) or not isinstance(data.get("flops"), dict):
        raise UserError(
            f"--machine: {path} must have the fields of a machine (planning/hardware/machines.yml)"
        )
    listed = {field.name for field in fields(Machine)} - {"name"}
    for name in data:
        if name not in listed:
            raise UserError(
                f"--machine: {format_name(path)} has no field {format_value(name)}"
                f"{did_you_mean(str(name), listed)}"
            )
    required = {f.name for f in fields(Machine) if f.default is MISSING is f.default_factory}
    required -= {"name", "title"}
    if missing := sorted(required - set(data)):
        raise UserError(
            f"--machine: {path} lacks {', '.join(missing)} (planning/hardware/machines.yml)"
        )
    try:
        machine = Machine(**{"name": path.stem, "title": path.stem, **data})
        machine.check()
    except ValueError as error:
        raise UserError(f"--machine: {path}: {error}") from None
    return machine
