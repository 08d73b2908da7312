"""Compile the fine-tuning program of a preset ahead of time, for virtual devices.

    python3 -m benchmarks.compile --config xxl_pod64

Neither weights nor state are allocated, and nothing runs: a laptop compiles the program of 64
devices. Prints one JSON line: seconds, peak memory of this process, and XLA's account of the
compiled program next to the plan's, in bytes of one device.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import popxl
from config.sections import RunConfig
from finetuning import UNUSED
from modelling.phases.training import build_training
from modelling.spec import family_of
from planning.hardware.resource_errors import explain_shortages
from run.records.pace import peak_host_bytes
from run.throughput import read_throughput_line
from terminal.entry_point import entry_point


@dataclass(frozen=True)
class Account:
    """Bytes of one device: what lives as long as the program, what comes and goes, and both.

    Virtual CPU devices keep remote buffers in the same memory as everything else.
    """

    arguments: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries

    @classmethod
    def of(cls, memory: popxl.plan.MemoryUse) -> Account:
        """From XLA's analysis of a compiled program, or from a plan."""
        return cls(memory.variables + memory.streams + memory.remote, memory.temporaries)


@dataclass(frozen=True)
class Compilation:
    """What compiling a configuration took and gave.

    Attributes:
        build_seconds: writing the program as an Ir.
        plan_seconds: planning it.
        compile_seconds: tracing and compiling it, unless it came from the cache (`from_cache`).
        peak_rss: bytes of this process at most; None on Windows, which does not tell.
        ratio: the plan's total over XLA's.
    """

    replicas: int
    build_seconds: float
    plan_seconds: float
    compile_seconds: float
    from_cache: bool
    peak_rss: int | None
    xla: Account
    plan: Account

    @property
    def ratio(self) -> float:
        return self.plan.total / self.xla.total

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        totals = {name: getattr(self, name).total for name in ("xla", "plan")}
        return asdict(self) | {"total": totals, "ratio": self.ratio}


def compile_program(config: RunConfig) -> Compilation:
    """Build, plan and compile the fine-tuning program on virtual CPU devices."""
    start = time.perf_counter()
    family = family_of(config)
    ir = build_training(config, family.build_phases, weight_map=family.weight_map(config)).ir
    built = time.perf_counter()
    plan = popxl.plan.plan_of(ir)
    planned = time.perf_counter()
    session = popxl.Session(ir, "cpu")
    done = time.perf_counter()
    return Compilation(
        replicas=ir.replication_factor,
        build_seconds=built - start,
        plan_seconds=planned - built,
        compile_seconds=done - planned,
        from_cache=session.startup.from_cache,
        peak_rss=peak_host_bytes(),
        xla=Account.of(session.memory_use()),
        plan=Account.of(plan),
    )


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Compile and print."""
    line = read_throughput_line("finetuning", __doc__, arguments, UNUSED)
    with explain_shortages(line.preset, line.config):
        measured = compile_program(line.config)
    print(json.dumps({"benchmark": "compile", "config": line.preset, **measured.as_dict()}))


if __name__ == "__main__":
    sys.exit(main())
