"""What a device does while a model trains in phases: work, transfers, and how far they overlap.

    python3 -m benchmarks.device --config gptj_6B_gpu --runs 3
    python3 -m benchmarks.device --config xl_gpu | tail -1 > record.json
    python3 -m benchmarks.device --record runs/h100

On generated data and with random weights. Runs are measured as they are, and then with the host
waiting for each transfer and each computation before the next, so that nothing overlaps. What the
first is faster by is what overlaps. Ends with one JSON line.

`--record DIR` measures a machine within nine minutes instead: bandwidths, the matrix rate, and
large presets compared with the timeline (see `benchmarks.device_record`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import run_benchmark
from benchmarks.device_record import MINUTES, record, tasks
from benchmarks.machine_use import MachineUse
from config.sections import RunConfig
from data.batches import Loader
from data.samples import Batch
from files.writing import check_folder
from machine.devices import described_devices, device_desc
from modelling.spec import family_of
from planning.needs import finetuning_needs
from popxl import hardware
from popxl.session import Timing
from sessions.training import FineTuning
from terminal.entry_point import entry_point


@dataclass(frozen=True)
class Measurement:
    """Seconds are of one run of the program, medians as it runs, means one after the other.

    Attributes:
        devices: what they are.
        tokens_per_second: the encoder's and the decoder's, padding included.
        seconds: as it runs.
        loads, stores: transfers from and to remote buffers, one after the other.
        computing: segments, one after the other.
        transfer_share: loads and stores, as a fraction of `seconds`. It may be more than 1.
        hidden_share: the fraction of the transfers that takes no time of its own as it runs.
        peak_device_bytes: of a device; None where the platform does not tell, as on CPU.
        planned_device_bytes: what the program needs of it by its plan.
    """

    devices: str
    tokens_per_second: float
    seconds: float
    loads: float
    stores: float
    computing: float
    transfer_share: float
    hidden_share: float
    peak_device_bytes: int | None
    planned_device_bytes: int
    machine: MachineUse


def measure(config: RunConfig, runs: int) -> Measurement:
    """Train for one unmeasured run of the program, and `runs` measured ones each way."""
    family = family_of(config)
    samples, iterations = config.training.global_batch_size, config.execution.device_iterations
    model = FineTuning(config, family)
    loader = Loader.of(config, family.sample_format.generated(config, 4 * samples, None))
    model.write(family.weights(config).initial(config.model.seed))
    sizes: list[int] = []

    def run() -> float:
        batches = [loader.next_batch() for _ in range(iterations)]
        sizes.append(sum(_positions(batch, samples) for batch in batches))
        start = time.perf_counter()
        model.run(batches, [1e-4] * iterations, len(sizes) * iterations)
        return time.perf_counter() - start

    with model:
        run()
        seconds = statistics.median(run() for _ in range(runs))
        with model.session.timing(apart=True) as apart:
            for _ in range(runs):
                run()
    return _of(config, model, apart, seconds, statistics.mean(sizes), iterations * samples)


def _positions(batch: Batch, samples: int) -> int:
    """Of the sequences of a global batch, of which one process has so many samples."""
    own = sum(array.size for name, array in batch.items() if name.endswith("input_ids"))
    return own * samples // len(batch["input_ids"])


def _of(
    config: RunConfig, model: FineTuning, apart: Timing, seconds: float, tokens: float, samples: int
) -> Measurement:
    loads, stores, computing = (
        sum(getattr(part, kind).seconds for part in apart.parts.values()) / apart.programs
        for kind in ("loads", "stores", "runs")
    )
    moving = loads + stores
    saved = apart.seconds / apart.programs - seconds
    return Measurement(
        described_devices(config),
        tokens / seconds,
        seconds,
        loads,
        stores,
        computing,
        moving / seconds,
        min(max(saved / moving, 0.0), 1.0) if moving else 0.0,
        hardware.peak_device_bytes(device_desc(config), config.replicas),
        model.session.plan().device,
        MachineUse.of(config, finetuning_needs, samples / seconds),
    )


def _summary(measured: Measurement) -> str:
    return (
        f"{measured.devices}: {measured.tokens_per_second:,.0f} tokens/s, "
        f"{measured.machine.model_flops_per_second / 1e12:,.2f} TFLOP/s of the model; transfers "
        f"are {measured.transfer_share:.0%} of a step, {measured.hidden_share:.0%} of them hidden"
    )


def _record(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Measure a machine within minutes.")
    parser.add_argument("--record", type=Path, required=True, metavar="DIR", help="where it goes")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all of it")
    parser.add_argument("--train", nargs="*", default=["gptj_6B_gpu", "xl_gpu"], metavar="PRESET")
    parser.add_argument("--fp8", nargs="*", default=["gptj_6B_gpu_fp8"], metavar="PRESET")
    parser.add_argument("--generate", nargs="*", default=["gptj_6B_gpu"], metavar="PRESET")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "gpu", "tpu"])
    given = parser.parse_args(arguments)
    check_folder("the record to", given.record)
    given.record.mkdir(parents=True, exist_ok=True)
    wanted = tasks(given.train, given.fp8, given.generate)
    record(given.record, wanted, ["--device", given.device], given.minutes)
    print((given.record / "record.md").read_text(encoding="utf-8"))


@entry_point()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, or record."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if any(each.partition("=")[0] == "--record" for each in given):
        _record(given)
        return
    run_benchmark("finetuning", __doc__, arguments, measure, _summary, finetuning_needs)


if __name__ == "__main__":
    sys.exit(main())
