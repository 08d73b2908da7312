"""A plan formatted as text, for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from config.memory_lower_bound import ITEM_BYTES
from planning.report import REST, PhaseRow, PlanReport

_LEGEND = """\
One device, one run. device: bytes read and written in its memory; from host, to host: bytes between
them; sent: to other devices; live: most intermediate values at a time; ms: of the resource that
takes longest; waits: when a simulated run computes nothing, waiting for transfers or the host."""
_INPUTS = "inputs: the step's batch, from the data's streams into buffers in host memory."
_REST = {
    "finetuning": f"{REST}: buffers set to zero, the gradients' norm, the loops over layers.",
    "evaluation": f"{REST}: the loops over layers.",
    "inference": f"{REST}: masks, the choice of each token, the loops over tokens and layers.",
}


@dataclass(frozen=True)
class TableUnits:
    """Units of the columns in a plan's table, such as GB and ms, each with its factor."""

    flops: tuple[str, float]
    bytes: tuple[str, float]

    @classmethod
    def for_report(cls, report: PlanReport) -> TableUnits:
        """Choose units in which the largest number of each column is above 1."""
        if max(row.part.device_traffic for row in report.rows) < 1e9:
            return cls(("GFLOP", 1e9), ("MB", 1e6))
        return cls(("TFLOP", 1e12), ("GB", 1e9))


def format_report(report: PlanReport) -> str:
    """Format a plan: totals, a table of phases with a legend, and the collectives."""
    closing = [*_collective_lines(report), *_hint_lines(report)]
    blocks = [_total_lines(report), _table_lines(report), _legend_lines(report), closing]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _total_lines(report: PlanReport) -> list[str]:
    """Return the lines above the table of phases: time, memory and advice."""
    requirements, plan = report.requirements, report.plan
    c = requirements.config
    e = c.execution
    stored = plan.host_bytes + (plan.resident + plan.disk) * plan.replicas
    activations = stored - requirements.state
    lines = [
        f"{requirements.kind} of {report.preset}: {requirements.parameters / 1e6:,.1f} M "
        f"parameters in {c.model.precision}",
        f"devices      {plan.replicas} = {e.data_parallel} dp × {e.tensor_parallel} tp, "
        f"{format_devices(report)}",
        f"fits         {_format_fits(report)}",
    ]
    if requirements.kind == "finetuning":
        lines += [
            f"batch        {c.training.global_batch_size} = {e.micro_batch_size} micro × "
            f"{c.gradient_accumulation} accumulation × {e.data_parallel} dp",
            f"state        {format_bytes(requirements.state)} = parameters × "
            f"{requirements.state / requirements.parameters:.4g} bytes ({_format_state(report)})",
            f"buffers      {format_bytes(stored)}: the state and {format_bytes(activations)} of "
            "activations and inputs",
            f"host memory  {format_bytes(plan.host_bytes)} of them; "
            f"{format_bytes(report.bytes_per_host)} a host",
            *_disk_lines(report),
        ]
    elif requirements.kind == "evaluation":
        lines += [
            f"batch        {requirements.samples} = {e.micro_batch_size} micro × "
            f"{c.gradient_accumulation} micro-batches × {e.data_parallel} dp",
            f"weights      {format_bytes(requirements.state)}, loaded layer by layer",
            *_disk_lines(report),
        ]
    else:
        loops = "micro-batches of a pass" if requirements.streamed else "device iterations"
        at_once = e.micro_batch_size * e.data_parallel
        lines += [
            f"batch        {requirements.samples} = {e.micro_batch_size} micro × "
            f"{e.data_parallel} dp × {requirements.samples // at_once} {loops}",
            f"weights      {_format_weights(report)}",
            f"writes       {requirements.tokens:,} tokens a run at most, "
            f"{report.tokens_per_second:,.1f} tokens/s",
        ]
        if plan.disk:
            lines += _disk_lines(report)
    lines += [
        f"device       {format_bytes(report.device_bytes)} each: "
        f"{', '.join(_device_memory_items(report))}",
        f"work         {requirements.flops_per_sample / 1e9:,.2f} GFLOP a sample in matrix "
        "products",
        f"bound        {report.seconds:,.3f} s a run, {requirements.samples / report.seconds:,.1f} "
        f"samples/s at best: matrix units busy {report.utilisation:.0%}",
    ]
    settings = [f"faster       {text}" for text in format_setting_advice(report)]
    advice = [*_batch_advice_lines(report), *settings]
    tried = [*advice, *_pass_lines(report), *_memory_option_lines(report)]
    simulated = [*_simulated_lines(report), *_bucket_lines(report)]
    return [*lines, *simulated, *tried, *_placement_lines(report)]


def _format_state(report: PlanReport) -> str:
    """Format the bytes of training state (weights, optimizer state) per model parameter."""
    requirements, c = report.requirements, report.requirements.config
    resident = c.master_weight_slot
    master = "" if resident is None else f", {resident.name} {resident.itemsize}"
    gradient = ITEM_BYTES[c.training.gradient_dtype]
    moments = requirements.moments / requirements.parameters
    return f"weight, gradient {gradient}, moments {moments:.2g}{master}"


def _format_weights(report: PlanReport) -> str:
    """Format which weights are resident and which are streamed in generation."""
    if not report.requirements.streamed:
        return "resident: on the device, all the time"
    return (
        "streamed: each layer's visit the device once for every position "
        f"(host memory {format_bytes(report.bytes_per_host)} a host)"
    )


def _disk_lines(report: PlanReport) -> list[str]:
    """Return lines on the state stored on disk, and on the bytes that a run reads and writes."""
    if not report.plan.disk:
        return []
    read, written = (
        sum(getattr(row.part, name) for row in report.rows) * report.plan.replicas
        for name in ("disk_read", "disk_written")
    )
    return [
        f"disk         {format_bytes(report.plan.disk * report.plan.replicas)} of them; "
        f"{format_bytes(report.disk_per_host)} a host; a run reads {format_bytes(read)} and writes "
        f"{format_bytes(written)}"
    ]


def _device_memory_items(report: PlanReport) -> list[str]:
    plan, timeline = report.plan, report.timeline
    between, on_its_way, gaps = plan.temporaries, "", []
    if timeline is not None and report.machine.platform != "cpu":
        between, on_its_way = timeline.peak - plan.resident, " and what is on its way"
        gaps = [f"{format_bytes(timeline.extent - timeline.peak)} between arrays"]
    resident = [] if not plan.resident else [f"{format_bytes(plan.resident)} of remote buffers"]
    return [
        f"{format_bytes(between)} intermediate values{on_its_way}",
        *gaps,
        *resident,
        f"{format_bytes(plan.variables - plan.resident)} variables",
        f"{format_bytes(plan.streams)} host streams",
    ]


def _batch_advice_lines(report: PlanReport) -> list[str]:
    """Return a line with the advice on the batch size, or no line."""
    text = format_batch_advice(report)
    return [] if text is None else [f"small batch  {text}"]


def format_batch_advice(report: PlanReport) -> str | None:
    """Format the advice on the batch size; None without advice."""
    larger = report.larger_batch
    if larger is None:
        return None
    c = report.requirements.config
    return (
        f"{c.training.global_batch_size} samples a step are few for {c.num_replicas} devices: with "
        f"--global_batch_size {larger.samples} about {larger.gain:.1f} times the samples/s"
    )


def format_setting_advice(report: PlanReport) -> list[str]:
    """Format the advice on settings with a faster step, a text for each."""
    fits = "" if report.fits else "it fits, "
    return [
        f"with --{faster.field} {faster.value}: {fits}{faster.seconds:,.3g} s a step"
        for faster in report.faster_settings
    ]


def _memory_option_lines(report: PlanReport) -> list[str]:
    """Return a line on the time that options cost which only save memory."""
    if report.without_memory_options is None or report.requirements.placement_result is None:
        return []
    given, best = report.requirements.config.execution, report.requirements.placement_result.best
    named = " and ".join(
        f"{name} {str(getattr(given, name)).lower()}"
        for name, _ in report.without_memory_options.variant.changes
    )
    return [
        f"costs        {named}: {best.seconds - report.without_memory_options.seconds:,.3f} s of "
        f"a run, which takes {report.without_memory_options.seconds:,.3f} s without"
    ]


def _placement_lines(report: PlanReport) -> list[str]:
    """Return lines on the remote-buffer entries that stay on the device."""
    placement = report.requirements.placement
    if placement is None:
        return []
    resident = [
        f"             {format_bytes(kind.nbytes)} of {kind.label}: {kind.entries:,} of "
        f"{kind.total:,} "
        + (f"entries; all would save {1e3 * kind.saves:,.0f} ms" if kind.saves else "entries")
        for kind in sorted(placement.kinds, key=lambda kind: -kind.nbytes)
        if kind.nbytes >= 5e7
    ]
    return [
        f"placement    {format_bytes(placement.nbytes)} of the buffers on each device, with room "
        f"for {format_bytes(max(placement.free_bytes, 0))}; "
        f"{placement.all_host_timeline.seconds:,.3f} s with all in host memory",
        *resident,
    ]


def _pass_lines(report: PlanReport) -> list[str]:
    """Return lines on micro-batches per pass, saved activations, and all trials."""
    result = report.requirements.placement_result
    if result is None or len(result.tried) + result.left_out < 2:
        return []
    others = [
        f"{trial.title}: {trial.seconds:,.3f} s" + ("" if trial.fits else " (does not fit)")
        for trial in result.tried
        if trial is not result.best
    ]
    if result.left_out:
        others.append(f"{result.left_out} more cannot be faster")
    best = f"passes       {result.best.title}: {result.best.seconds:,.3f} s"
    return [f"{best}; {', '.join(others)}"]


def _simulated_lines(report: PlanReport) -> list[str]:
    """Return a line on the time and utilization of the simulated run."""
    timeline = report.timeline
    if timeline is None:
        return []
    dispatch = sum(phase.dispatch for phase in timeline.exposed.values())
    prefetch = (
        f"loads up to {format_bytes(timeline.window)} ahead" if timeline.loads else "no loads"
    )
    return [
        f"simulated    {timeline.seconds:,.3f} s a run, "
        f"{report.requirements.samples / timeline.seconds:,.1f} samples/s: matrix units busy "
        f"{report.simulated_utilisation:.0%}; {timeline.exposed_transfers:,.3f} s waiting for "
        f"transfers, {dispatch:,.3f} s for the host; {prefetch}"
    ]


def _bucket_lines(report: PlanReport) -> list[str]:
    """Return a line on simulated runs with shorter samples (`data.length_buckets`)."""
    if not report.bucket_seconds:
        return []
    longest = report.requirements.config.model.sequence_length
    times = {**report.bucket_seconds, longest: report.expected_seconds}
    listed = ", ".join(f"{length}: {seconds:,.3f} s" for length, seconds in times.items())
    return [f"buckets      a run with samples of at most so many tokens: {listed}"]


def _format_fits(report: PlanReport) -> str:
    memory_use = [
        f"{format_bytes(needed)} of {format_bytes(available)} {name}"
        for name, (needed, available) in report.memory_use.items()
    ]
    fits = f"{'yes' if report.fits else 'NO'}: {', '.join(memory_use)}"
    short = {name for name, (needed, available) in report.memory_use.items() if needed > available}
    if report.requirements.config.execution.disk is None and short & {"host memory", "memory"}:
        fits += "; --execution.disk DIR takes what host memory cannot hold"
    return fits


def _table_lines(report: PlanReport) -> list[str]:
    units = TableUnits.for_report(report)
    rows = [_table_head(units), *(_table_row(row, report, units) for row in report.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_format_row(row, widths) for row in rows]


def _table_head(units: TableUnits) -> tuple[str, ...]:
    name = units.bytes[0]
    return ("phase", "", units.flops[0], f"device {name}", f"from host {name}", f"to host {name}",
            f"sent {name}", "live MB", "ms", "bound by", "waits ms")  # fmt: skip


def _table_row(row: PhaseRow, report: PlanReport, units: TableUnits) -> tuple[str, ...]:
    part = row.part
    sent = sum(c.sent for c in part.collectives)
    per_flop, per_byte = units.flops[1], units.bytes[1]
    return (
        row.phase, row.direction, f"{part.flops / per_flop:.3f}",
        f"{part.device_traffic / per_byte:.2f}", f"{part.host_to_device / per_byte:.3f}",
        f"{part.device_to_host / per_byte:.3f}", f"{sent / per_byte:.3f}",
        f"{part.device_bytes / 1e6:.1f}", f"{row.times.seconds * 1e3:.2f}", row.times.bottleneck,
        "" if report.timeline is None else f"{report.idle_time(row).seconds * 1e3:.2f}",
    )  # fmt: skip


def _legend_lines(report: PlanReport) -> list[str]:
    """Return lines that explain the table's columns, and its rows that are no phases."""
    names = {row.phase for row in report.rows}
    lines = [_LEGEND]
    if "inputs" in names:
        lines.append(_INPUTS)
    if REST in names:
        lines.append(_REST[report.requirements.kind])
    return lines


def _format_row(cells: Sequence[str], widths: Sequence[int]) -> str:
    left_aligned = {0, 1, 9}  # names
    padded = (
        text.ljust(width) if i in left_aligned else text.rjust(width)
        for i, (text, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(padded).rstrip()


def _collective_lines(report: PlanReport) -> list[str]:
    count: Counter[tuple[str, int, bool]] = Counter()
    nbytes: Counter[tuple[str, int, bool]] = Counter()
    for row in report.rows:
        for c in row.part.collectives:
            key = c.kind, c.group_size, c.consecutive
            count[key] += c.count
            nbytes[key] += c.nbytes
    return [
        f"{count[key]:8,d} × {key[0]} over {key[1]} {'neighbours' if key[2] else 'replicas apart'}"
        f", {format_bytes(nbytes[key])}"
        for key in sorted(count)
    ]


def _hint_lines(report: PlanReport) -> list[str]:
    """Return a line on Graphcore's hardware options, which XLA ignores."""
    execution = report.requirements.config.execution
    loads = sum(row.part.code_loads for row in report.rows)
    hints = [f"code_load: {loads} loads of layers' code"] if execution.code_load else []
    for name in ("io_tiles", "available_memory_proportion"):
        value = getattr(execution, name)
        hints += [] if value is None else [f"{name} {value}"]
    return [f"hints, without effect here: {', '.join(hints)}"] if hints else []


def format_devices(report: PlanReport) -> str:
    """Format the number of hosts and devices, as in "on 8 hosts of 8 (NVIDIA H100 SXM)"."""
    machine, hosts = report.machine, report.hosts
    if machine.devices is None:
        return f"on {machine.title}"
    return f"on {hosts} host{'s' if hosts > 1 else ''} of {machine.devices} ({machine.title})"


def format_two_digits(number: float) -> str:
    """Format a number to two significant digits, as 1,200, 34 or 5.6."""
    rounded = float(f"{number:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.2g}"


def format_bytes(count: float) -> str:
    """Format a number of bytes in decimal units, as 1.50 GB or 20.3 MB."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
