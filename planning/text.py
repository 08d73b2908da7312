"""A plan as text for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from planning.report import Report, Row

_HEAD = ("phase", "", "TFLOP", "device GB", "from host", "to host", "sent GB", "live MB", "ms",
         "bound by")  # fmt: skip


def as_text(report: Report) -> str:
    """The facts of the whole, then a table of the phases, then what the collectives are."""
    lines = [*_facts(report), "", *_table(report), "", *_collectives(report), *_hints(report)]
    return "\n".join(lines)


def _facts(report: Report) -> list[str]:
    needs, plan, machine = report.needs, report.plan, report.machine
    c = needs.config
    e = c.execution
    activations = plan.host - needs.state
    lines = [
        f"{needs.kind} of {report.preset}: {needs.parameters / 1e6:,.1f} M parameters in "
        f"{c.model.precision}",
        f"devices      {plan.replicas} = {e.data_parallel} dp × {e.tensor_parallel} tp, "
        f"on {report.hosts} host(s) of {machine.devices} ({machine.title})",
    ]
    if needs.kind == "finetuning":
        lines += [
            f"batch        {c.training.global_batch_size} = {e.micro_batch_size} micro × "
            f"{c.gradient_accumulation} accumulation × {e.data_parallel} dp",
            f"state        {gigabytes(needs.state)} = parameters × "
            f"{needs.state // needs.parameters} bytes (weight, gradient 4, moments 8)",
            f"host memory  {gigabytes(plan.host)} in remote buffers: the state and "
            f"{gigabytes(activations)} of activations and inputs; "
            f"{gigabytes(report.bytes_per_host)} a host",
        ]
    else:
        lines.append(
            f"batch        {needs.samples} = {e.micro_batch_size} micro × {e.data_parallel} dp × "
            f"{e.device_iterations} device iterations"
        )
    lines += [
        f"device       {gigabytes(plan.device)} each: {gigabytes(plan.temporaries)} intermediate "
        f"values, {gigabytes(plan.variables)} variables, {gigabytes(plan.streams)} host streams",
        f"work         {needs.flops_per_sample / 1e9:,.2f} GFLOP a sample in matrix products",
        f"time         {report.seconds:,.3f} s a run, {needs.samples / report.seconds:,.1f} "
        f"samples/s at best: matrix units busy {report.utilisation:.0%}",
    ]
    return lines


def _table(report: Report) -> list[str]:
    rows = [_HEAD, *map(_cells, report.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    return [_line(row, widths) for row in rows]


def _cells(row: Row) -> tuple[str, ...]:
    part = row.part
    sent = sum(c.sent for c in part.collectives)
    return (
        row.phase, row.direction, f"{part.flops / 1e12:.3f}", f"{part.device_traffic / 1e9:.2f}",
        f"{part.host_to_device / 1e9:.3f}", f"{part.device_to_host / 1e9:.3f}",
        f"{sent / 1e9:.3f}", f"{part.device_bytes / 1e6:.1f}", f"{row.times.seconds * 1e3:.2f}",
        row.times.bound,
    )  # fmt: skip


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    left = {0, 1, len(cells) - 1}
    padded = (
        text.ljust(width) if i in left else text.rjust(width)
        for i, (text, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(padded).rstrip()


def _collectives(report: Report) -> list[str]:
    count: Counter[tuple[str, int, bool]] = Counter()
    nbytes: Counter[tuple[str, int, bool]] = Counter()
    for row in report.rows:
        for c in row.part.collectives:
            key = c.kind, c.group_size, c.consecutive
            count[key] += c.count
            nbytes[key] += c.nbytes
    return [
        f"{count[key]:8,d} × {key[0]} over {key[1]} {'neighbours' if key[2] else 'replicas apart'}"
        f", {gigabytes(nbytes[key])}"
        for key in sorted(count)
    ]


def _hints(report: Report) -> list[str]:
    """What the configuration asks of Graphcore's hardware, which XLA decides itself."""
    execution = report.needs.config.execution
    loads = sum(row.part.code_loads for row in report.rows)
    hints = [f"code_load: {loads} loads of layers' code"] if execution.code_load else []
    for name in ("io_tiles", "available_memory_proportion"):
        value = getattr(execution, name)
        hints += [] if value is None else [f"{name} {value}"]
    return [f"hints, without effect here: {', '.join(hints)}"] if hints else []


def gigabytes(count: float) -> str:
    """Bytes as text: 1.50 GB, 20.3 MB."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
