"""Device memory and compile time of fine-tuning as the number of layers grows: both stay flat.

    python3 -m benchmarks.phased
    python3 -m benchmarks.phased --layers 4 12 48 --rounds 3

Compiles the training program of a preset at each number of layers (per stack), in turn and
`--rounds` times, and prints medians. Ends with one JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import popxl
from config.base import nested
from config.families import config_class_of
from config.presets import load_config, preset_data
from config.sections import RunConfig
from modelling.devices import device_desc
from modelling.phases.training import build_training
from modelling.spec import family_of
from terminal.entry_point import entry_point
from terminal.parser import Parser


@dataclass(frozen=True)
class Measurement:
    """One number of layers; seconds are medians, bytes are of one device.

    Attributes:
        compute: device bytes that do not hold the state of the model: XLA's temporaries and the
            host streams.
        remote: host bytes of the remote buffers.
    """

    layers: int
    build_seconds: float
    compile_seconds: float
    compute: int
    remote: int


def measure(config: RunConfig) -> tuple[float, float, popxl.plan.MemoryUse]:
    """Seconds to build the Ir, seconds to trace and compile it, and its memory."""
    start = time.perf_counter()
    family = family_of(config)
    program = build_training(config, family.build_phases, weight_map=family.weight_map(config))
    built = time.perf_counter()
    session = popxl.Session(program.ir, device_desc(config))
    return built - start, time.perf_counter() - built, session.memory_use()


def measure_all(preset: str, layers: Sequence[int], rounds: int) -> list[Measurement]:
    """Measure each number of layers `rounds` times, interleaved."""
    config_class = config_class_of(preset_data("finetuning", preset), preset)
    runs: dict[int, list[tuple[float, float, popxl.plan.MemoryUse]]] = {n: [] for n in layers}
    for _ in range(rounds):
        for n in layers:
            depth = nested({config_class().model.path("num_hidden_layers"): n})
            config = load_config(config_class, "finetuning", preset, depth)
            runs[n].append(measure(config))
    return [
        Measurement(
            n,
            statistics.median(r[0] for r in runs[n]),
            statistics.median(r[1] for r in runs[n]),
            runs[n][0][2].temporaries + runs[n][0][2].streams,
            runs[n][0][2].remote,
        )
        for n in layers
    ]


def table(rows: Sequence[Measurement]) -> str:
    """The measurements, with ratios to the first."""
    first = rows[0]
    lines = ["layers  build s  compile s  (ratio)  compute MiB  (ratio)  host MiB"]
    lines += [
        f"{r.layers:6d}  {r.build_seconds:7.2f}  {r.compile_seconds:9.2f}  "
        f"({r.compile_seconds / first.compile_seconds:5.2f})  {r.compute / 2**20:11.2f}  "
        f"({r.compute / first.compute:5.3f})  {r.remote / 2**20:8.1f}"
        for r in rows
    ]
    return "\n".join(lines)


@entry_point(popxl.errors.DeviceError)
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="tiny", help="a preset of config/finetuning.yml")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12, 48])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    rows = measure_all(given.config, given.layers, given.rounds)
    print(table(rows))
    print(json.dumps({"benchmark": "phased", "rows": [asdict(r) for r in rows]}))


if __name__ == "__main__":
    sys.exit(main())
