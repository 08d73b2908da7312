"""Measure time and memory of compiling a preset's fine-tuning program for virtual devices.

    python3 -m benchmarks.compile --config xxl_pod64
    python3 -m benchmarks.compile --config tiny --depths 4 12 48

Neither weights nor state are allocated, and nothing runs: a laptop compiles the program of 64
devices. Prints one JSON line: seconds, peak memory of this process, and XLA's account of the
compiled program next to the plan's, in bytes of one device. With `--depths`, prints a table of
device memory and compile time over the number of layers (per stack) instead, and one JSON line;
seconds are medians of `--rounds` interleaved compilations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import popxl
from config.sections import RunConfig
from modelling.model_family import get_family
from modelling.phases.training import build_training_program
from planning.hardware.resource_errors import explain_resource_errors
from run.generated_data_benchmark import read_throughput_line
from run.records.throughput import peak_host_bytes
from run.training_throughput import UNUSED
from terminal.entry_point import entry_point
from terminal.parser import parse_count_option


@dataclass(frozen=True)
class DeviceBytes:
    """Memory of one device in bytes: a program's arguments and temporaries.

    Virtual CPU devices keep remote buffers in the same memory as everything else.

    Attributes:
        compute: bytes that do not hold the model's state: temporaries and host streams.
        remote: bytes of the remote buffers.
    """

    arguments: int
    temporaries: int
    compute: int
    remote: int

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries

    @classmethod
    def from_memory(cls, memory: popxl.plan.MemoryUse) -> DeviceBytes:
        """Returns the bytes of a compiled program, from XLA's memory analysis or from the plan."""
        arguments = memory.variables + memory.streams + memory.remote
        compute = memory.temporaries + memory.streams
        return cls(arguments, memory.temporaries, compute, memory.remote)


@dataclass(frozen=True)
class Compilation:
    """Compilation time of a configuration, and its planned and compiled memory.

    Attributes:
        build_seconds: time to write the program as an Ir.
        plan_seconds: time to plan it.
        compile_seconds: time to trace and compile it, or to read it from the cache (`from_cache`).
        peak_rss: peak memory of this process, in bytes; None on Windows.
        ratio: the plan's total over XLA's.
    """

    replicas: int
    build_seconds: float
    plan_seconds: float
    compile_seconds: float
    from_cache: bool
    peak_rss: int | None
    xla: DeviceBytes
    plan: DeviceBytes

    @property
    def ratio(self) -> float:
        return self.plan.total / self.xla.total

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields, total bytes, and ratio of compiled to planned bytes as JSON data."""
        totals = {name: getattr(self, name).total for name in ("xla", "plan")}
        return asdict(self) | {"total": totals, "ratio": self.ratio}


def compile_program(config: RunConfig) -> Compilation:
    """Build, plan and compile the fine-tuning program of a configuration on virtual CPU devices."""
    start = time.perf_counter()
    family = get_family(config)
    ir = build_training_program(
        config, family.build_phases, weight_map=family.weight_map(config)
    ).ir
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
        from_cache=session.startup_stats.from_cache,
        peak_rss=peak_host_bytes(),
        xla=DeviceBytes.from_memory(session.memory_use()),
        plan=DeviceBytes.from_memory(plan),
    )


def compile_depths(
    config: RunConfig, depths: Sequence[int], rounds: int
) -> list[dict[str, float | int]]:
    """Compile a configuration with each number of layers, in `rounds` interleaved rounds."""
    field = config.model.field_path("num_hidden_layers")
    compilations: dict[int, list[Compilation]] = {n: [] for n in depths}
    for _ in range(rounds):
        for n in depths:
            compilations[n].append(compile_program(config.with_values({field: n})))
    return [
        {
            "layers": n,
            "build_seconds": statistics.median(c.build_seconds for c in each),
            "compile_seconds": statistics.median(c.compile_seconds for c in each),
            "compute": each[0].xla.compute,
            "remote": each[0].xla.remote,
        }
        for n, each in compilations.items()
    ]


def format_depths(rows: Sequence[dict[str, float | int]]) -> str:
    """Returns a table of compile times by number of layers, with ratios to the first row."""
    first = rows[0]
    lines = ["layers  build s  compile s  (ratio)  compute MiB  (ratio)  host MiB"]
    lines += [
        f"{r['layers']:6d}  {r['build_seconds']:7.2f}  {r['compile_seconds']:9.2f}  "
        f"({r['compile_seconds'] / first['compile_seconds']:5.2f})  {r['compute'] / 2**20:11.2f}  "
        f"({r['compute'] / first['compute']:5.3f})  {r['remote'] / 2**20:8.1f}"
        for r in rows
    ]
    return "\n".join(lines)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--depths", type=parse_count_option, nargs="+", help="numbers of layers")
    parser.add_argument(
        "--rounds", type=parse_count_option, default=3, help="compilations of each depth"
    )


@entry_point(popxl.errors.DeviceError)
def main(arguments: Sequence[str] | None = None) -> None:
    """Compile a preset's fine-tuning program, and print the compile time and the memory."""
    line = read_throughput_line("finetuning", __doc__, arguments, UNUSED, _add_options)
    result: dict[str, Any]
    with explain_resource_errors(line.preset, line.config):
        if line.options.depths:
            rows = compile_depths(line.config, line.options.depths, line.options.rounds)
            print(format_depths(rows))
            result = {"rows": rows}
        else:
            result = compile_program(line.config).as_dict()
    print(json.dumps({"benchmark": "compile", "config": line.preset, **result}))


if __name__ == "__main__":
    sys.exit(main())
