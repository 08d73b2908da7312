"""Compare gradient accumulation with one reduction per micro-batch and with one per step.

    python3 -m benchmarks.accumulation
    python3 -m benchmarks.accumulation --processes 2 4 --counts 1 8 64
    python3 -m benchmarks.accumulation --layers 12 --hidden_size 768 --sequence_length 512 --plan

Measures both ways for each number of micro-batches, in turn, on 8 virtual devices of one process
(`--processes 1`) and on several processes, and prints a table. `--out DIR` writes
`accumulation.json` and the picture `accumulation.png`; measurements in the file are not repeated.
`--plan` runs nothing: it counts the reductions and computes their time on a machine.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import popxl
from benchmarks import accumulation_programs as programs
from benchmarks.accumulation_programs import (
    COUNTS,
    METHODS,
    AccumulationProgram,
    AccumulationRun,
    ModelAndBatchSize,
    list_collectives,
)
from config.errors import UserError
from files.atomic_writing import write_text_atomically
from planning.hardware.machines import Machine, machine
from terminal.entry_point import entry_point
from terminal.parser import Parser, parse_count_option

PLANNED_VOCABULARY = 50400
"""GPT-J's; a plan holds no weights."""

PUBLISHED = {32: (3.4460, 2.0715), 64: (5.1833, 2.3332)}
"""Seconds of a naive and of a local step by micro-batches, that `optax.MultiSteps` and a loop of
gradients took on a TPU v2-8."""

PUBLISHED_SIZE = (12, 768, 512, 512, 8)
"""Layers, hidden size, length, batch and devices of these."""


@dataclass(frozen=True)
class Reductions:
    """Number and bytes of the gradient reductions of one device in an optimizer step.

    Attributes:
        count: reductions that it takes part in.
        nbytes: bytes that it brings into them.
        sent: bytes that it sends, in a ring.
        seconds: on a machine.
    """

    count: int
    nbytes: int
    sent: int
    seconds: float


@dataclass(frozen=True)
class PlannedCase:
    """Planned gradient reductions of both accumulation methods, for one number of micro-batches.

    Attributes:
        link: bytes per second that explain the times in `PUBLISHED`; None: that is another size.
    """

    micro_batches: int
    naive: Reductions
    local: Reductions
    link: float | None

    def format_row(self) -> str:
        """Returns this case's row of the printed table of planned gradient reductions."""
        cells = [f"{self.micro_batches}"]
        for method in (self.naive, self.local):
            cells += [f"{method.count:,}", f"{method.nbytes / 1e9:.2f}", f"{method.seconds:.3f}"]
        cells.append("-" if self.link is None else f"{self.link / 1e9:.1f}")
        return " | ".join(cells)


def format_plan_head(machine: Machine) -> str:
    """Returns the header lines of the printed table of planned gradient reductions."""
    names = ["micro-batches"]
    for method in METHODS:
        names += [f"{method}: reductions", "GB reduced", f"s on {machine.title}"]
    names.append("GB/s that explain the measured seconds")
    return f"{' | '.join(names)}\n{'|'.join(['---'] * len(names))}"


def plan_reductions(
    size: ModelAndBatchSize, counts: Sequence[int], devices: int, machine: Machine
) -> Iterator[PlannedCase]:
    """Plan the gradient reductions of both accumulation methods for each count of micro-batches."""
    for count in counts:
        naive, local = (
            _count_reductions(
                AccumulationProgram(size, method, count, popxl.Ir(replication=devices)).ir, machine
            )
            for method in METHODS
        )
        of = (size.layers, size.hidden, size.length, size.batch, devices)
        link = None
        if of == PUBLISHED_SIZE and count in PUBLISHED:
            before, after = PUBLISHED[count]
            link = (naive.sent - local.sent) / (before - after)
        yield PlannedCase(count, naive, local, link)


def _count_reductions(ir: popxl.Ir, machine: Machine) -> Reductions:
    all_collectives = list_collectives(ir)
    return Reductions(
        sum(c.count for c in all_collectives),
        sum(c.nbytes for c in all_collectives),
        sum(c.sent for c in all_collectives),
        machine.achieved_rates("float32", ir.replication_factor).collective_seconds(
            all_collectives
        ),
    )


DEVICES = 8
Pairs = dict[tuple[int, int], tuple[AccumulationRun, AccumulationRun]]
"""(naive, local) by processes and micro-batches."""


class MeasurementFile:
    """List of measured runs, also written to a JSON file if a path is given.

    Args:
        settings: of the measurements; a file with other settings is refused with UserError.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path, self._settings = path, settings
        self.pairs: Pairs = {}
        if path is None or not path.exists():
            return
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["of"] != settings:
            raise UserError(f"{path} has measurements of another size: give another --out")
        runs = [AccumulationRun(**m) for m in data["measured"]]
        for naive, local in zip(runs[::2], runs[1::2], strict=True):
            self.pairs[local.processes, local.micro_batches] = naive, local

    def add(self, naive: AccumulationRun, local: AccumulationRun) -> None:
        """Add a measured run of both accumulation methods, and write the file."""
        self.pairs[local.processes, local.micro_batches] = naive, local
        if self._path is not None:
            runs = [asdict(m) for pair in self.pairs.values() for m in pair]
            text = json.dumps({"of": self._settings, "measured": runs}, indent=1)
            write_text_atomically("the measurements", self._path, text + "\n")


def check_batch(size: ModelAndBatchSize, count: int, devices: int) -> None:
    """Raise UserError unless the devices can split the batch into equal micro-batches."""
    if size.batch % (count * devices):
        raise UserError(
            f"{size.batch} samples cannot be cut into {count} micro-batches on {devices} devices"
        )


def measure_all(
    file: MeasurementFile,
    size: ModelAndBatchSize,
    counts: Sequence[int],
    groups: Sequence[int],
    steps: int,
    devices: int,
) -> None:
    """Print a row for each case; measures cases first that the measurement file does not have."""
    for group, count in ((group, count) for group in groups for count in counts):
        check_batch(size, count, devices if group == 1 else group)
        if (group, count) not in file.pairs:
            file.add(
                *programs.measure_both(size, count, devices, steps)
                if group == 1
                else programs.measure_in_processes(size, count, group, steps)
            )
        print(format_row(*file.pairs[group, count]), flush=True)


TABLE_HEAD = """\
on | micro-batches | naive, s | local, s | saved | naive, MB reduced | local | perplexity
---|---|---|---|---|---|---|---"""


def format_row(naive: AccumulationRun, local: AccumulationRun) -> str:
    """Returns a table row of measured seconds, with the perplexity, equal for both methods."""
    where = f"{local.processes} processes" if local.processes > 1 else f"{local.devices} devices"
    perplexity = math.exp(local.losses[-1])
    return (
        f"{where} | {local.micro_batches} | {naive.seconds:.3f} | {local.seconds:.3f} "
        f"| {1 - local.seconds / naive.seconds:.0%} "
        f"| {naive.reduced / 1e6:.1f} | {local.reduced / 1e6:.1f} | {perplexity:.3f}"
    )


def plot_seconds_per_step(pairs: Pairs, path: Path) -> None:
    """Plot seconds per step over micro-batches, with a panel for each number of processes."""
    from matplotlib.figure import Figure

    groups = sorted({group for group, _ in pairs})
    figure = Figure(figsize=(4 * len(groups), 3.4), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for panel, group in zip(panels, groups, strict=True):
        counts = sorted(n for g, n in pairs if g == group)
        for i, method in enumerate(METHODS):
            panel.plot(counts, [pairs[group, n][i].seconds for n in counts], "o-", label=method)
        virtual = f"{pairs[group, counts[0]][0].devices} virtual devices"
        title = f"{group} processes" if group > 1 else virtual
        panel.set(title=title, xlabel="micro-batches a step", ylabel="seconds a step")
        panel.set_xscale("log", base=2)
        panel.set_xticks(counts, [str(n) for n in counts])
        panel.set_ylim(bottom=0)
        panel.legend()
    figure.savefig(path, dpi=120)


@entry_point(single_process=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Plan or measure gradient accumulation by both methods, and print a table."""
    args = _create_parser().parse_args(arguments)
    if args.plan:
        _print_plan(args)
        return
    if args.steps < 2:
        raise UserError("--steps must be 2 or more: the first step is not counted")
    size = _parse_size(args, ModelAndBatchSize.vocabulary)
    path = args.out and args.out / "accumulation.json"
    of = asdict(size) | {"steps": args.steps}
    file = MeasurementFile(path, of if args.devices == DEVICES else of | {"devices": args.devices})
    print(TABLE_HEAD)
    measure_all(file, size, args.counts or COUNTS, args.processes, args.steps, args.devices)
    if args.out is not None:
        plot_seconds_per_step(file.pairs, args.out / "accumulation.png")


def _print_plan(args: argparse.Namespace) -> None:
    size, target = _parse_size(args, PLANNED_VOCABULARY), machine(args.machine)
    counts = args.counts or (32, 64)
    for count in counts:
        check_batch(size, count, args.devices)
    print(format_plan_head(target))
    for case in plan_reductions(size, counts, args.devices, target):
        print(case.format_row(), flush=True)


def _parse_size(args: argparse.Namespace, vocabulary: int) -> ModelAndBatchSize:
    size = ModelAndBatchSize(
        layers=args.layers,
        hidden=args.hidden_size,
        heads=args.heads,
        vocabulary=args.vocabulary or vocabulary,
        length=args.sequence_length,
        batch=args.batch,
    )
    if size.hidden % size.heads or size.hidden // size.heads < programs.ROTARY:
        raise UserError(
            f"--hidden_size {size.hidden} must be a multiple of --heads {size.heads}, and give "
            f"each head {programs.ROTARY} features or more"
        )
    return size


def _create_parser() -> Parser:
    parser = Parser.of_script(__doc__)
    parser.add_argument("--processes", type=parse_count_option, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--counts", type=parse_count_option, nargs="+", help="micro-batches of a step"
    )
    parser.add_argument(
        "--steps", type=parse_count_option, default=4, help="optimizer steps, 2 or more"
    )
    parser.add_argument(
        "--batch",
        type=parse_count_option,
        default=ModelAndBatchSize.batch,
        help="samples of a step",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write JSON and a picture")
    for name in ("layers", "heads"):
        default = getattr(ModelAndBatchSize, name)
        parser.add_argument(f"--{name}", type=parse_count_option, default=default)
    parser.add_argument("--hidden_size", type=parse_count_option, default=ModelAndBatchSize.hidden)
    parser.add_argument(
        "--sequence_length", type=parse_count_option, default=ModelAndBatchSize.length
    )
    parser.add_argument(
        "--vocabulary",
        type=parse_count_option,
        help="words (default: 512; of a plan GPT-J's 50400)",
    )
    parser.add_argument(
        "--devices", type=parse_count_option, default=DEVICES, help="of one process"
    )
    parser.add_argument("--plan", action="store_true", help="count reductions, and stop")
    parser.add_argument(
        "--machine", default="tpu_v2", metavar="NAME", help="of --plan: whose links (tpu_v2)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
