"""Plans of our rows in the comparison of training programs: `benchmarks.device --peers DIR --plan`.

    python3 -m benchmarks.device --peers benchmarks/results --plan --machine h100 h200

Needs no GPU. The record, planned_peers.json, has a row for each machine and what is done there;
`python3 -m docs.tables` draws the table of docs/benchmarks.md from it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.peer_programs import PeerWork
from docs.tables import format_markdown_table
from files.atomic_writing import write_text_atomically
from planning.hardware.machines import Machine, machine
from planning.program_variants import VariantCache
from planning.report import make_report
from planning.requirements import finetuning_requirements
from terminal.screen import say

RECORD = "planned_peers.json"
MACHINES = "h100", "h200"


@dataclass(frozen=True)
class PlannedPeerRow:
    """The plan of one optimizer step on one device of a machine.

    Attributes:
        state: dtypes of the moments and of the stored gradients.
        tokens: of a step, padding included.
        packed: True for texts of several lengths, with attention within each.
        seconds: of a simulated step.
    """

    machine: str
    model: str
    state: str
    tokens: int
    packed: bool
    micro_batch_size: int
    fits: bool
    seconds: float
    device_bytes: int
    host_bytes: int


def plan_peer(work: PeerWork, target: Machine, programs: VariantCache) -> PlannedPeerRow:
    """Plan our program's step on one device of a machine."""
    config = work.config()
    on = replace(target, devices=1)
    requirements = finetuning_requirements(config, on.target, programs)
    report = make_report(work.model, requirements, on)
    return PlannedPeerRow(
        target.name,
        work.model,
        f"{config.training.optimizer.state} moments, {config.training.gradient_dtype} sums",
        requirements.tokens,
        work.packed,
        config.execution.micro_batch_size,
        report.fits,
        round(report.expected_seconds, 3),
        report.device_bytes,
        report.bytes_per_host,
    )


def record_plans(
    folder: Path, works: Sequence[PeerWork], machine_names: Sequence[str]
) -> list[PlannedPeerRow]:
    """Plan each work on each machine; writes the record after each work."""
    rows, targets = list[PlannedPeerRow](), [machine(name) for name in machine_names]
    for work in works:
        programs = VariantCache()  # machines of one kind share the traced programs
        for target in targets:
            rows.append(plan_peer(work, target, programs))
            say(_format_row(rows[-1]))
        text = json.dumps([asdict(row) for row in rows], indent=1)
        write_text_atomically("the record", folder / RECORD, text + "\n")
    return rows


def read_plans(folder: Path) -> list[PlannedPeerRow]:
    """Read the rows of a record."""
    rows = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    return [PlannedPeerRow(**row) for row in rows]


def _format_row(row: PlannedPeerRow) -> str:
    packed = ", packed" if row.packed else ""
    return (
        f"{row.machine}: {row.model}{packed}, {row.tokens:,} tokens, {row.state}: "
        f"{_format_seconds(row)} with micro-batches of {row.micro_batch_size}"
    )


def _format_seconds(row: PlannedPeerRow) -> str:
    return f"{row.seconds:.2f} s" if row.fits else "does not fit"


def format_plans(rows: Sequence[PlannedPeerRow]) -> str:
    """Returns a Markdown table of planned steps, with two columns for each machine."""
    machines = list(dict.fromkeys(row.machine for row in rows))
    head = ["Model", "Tokens", "Moments, sums", "Micro-batch"]
    for name in machines:
        head += [machine(name).title, "GB"]
    by_work: dict[tuple[str, ...], dict[str, PlannedPeerRow]] = {}
    for row in rows:
        cells = (
            f"{row.model}{', packed' if row.packed else ''}",
            f"{row.tokens:,}",
            row.state.replace(" moments", "").replace(" sums", ""),
            str(row.micro_batch_size),
        )
        by_work.setdefault(cells, {})[row.machine] = row
    lines = []
    for cells, by_machine in by_work.items():
        line = [*cells]
        for name in machines:
            planned = by_machine.get(name)
            line.append("" if planned is None else _format_seconds(planned))
            line.append("" if planned is None else f"{planned.device_bytes / 1e9:.1f}")
        lines.append(tuple(line))
    return format_markdown_table(tuple(head), lines)
