"""Write the tables of docs/large_models.md: published models on a laptop to eight GPUs.

    python3 -m docs.large_models            # simulates all of it, which takes minutes
    python3 -m docs.large_models --missing  # simulates what there are no numbers of: goes on
    python3 -m docs.large_models "GPT-J 6B" # simulates these models, and what is missing
    python3 -m docs.large_models --tables   # simulates nothing: writes the document

The numbers are in docs/large_models.json, and those of runs that were measured in
benchmarks/results/full_size.jsonl. The tables stand in docs/large_models.md between
`<!-- models -->`, `<!-- speed -->`, `<!-- memory -->`, `<!-- adapters -->` or
`<!-- measured -->` and `<!-- end -->`. Tests fail where they are out of date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.disk_offload import RUNS
from config.families import load_finetuning_config
from docs.tables import format_markdown_table
from planning.fit_search import plan_best_training
from planning.hardware.machines import machine
from planning.parallel_layouts import list_layouts
from planning.program_variants import VariantCache
from planning.report import PlanReport
from planning.report_text import format_two_digits

DOCUMENT = Path(__file__).with_suffix(".md")
NUMBERS = Path(__file__).with_suffix(".json")
RECORDS = NUMBERS.parents[1] / "benchmarks" / "results" / "full_size.jsonl"
_BLOCK = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "FLAN-T5 XL": ("xl_gpu", {}),
    "FLAN-T5 XXL": ("xxl_gpu", {}),
    "GPT-J 6B": ("gptj_6B_gpu", {}),
    "Qwen3 0.6B": ("qwen3_0_6B", {}),
    "Qwen3 32B": ("qwen3_32B", {}),
    "Llama 3.1 8B": ("llama3_1_8B", {}),
}
"""By title: a preset, and what is changed in it."""

_70B = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
}
_BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3 32B": ("qwen3_32B", {}),
    "Llama 3.1 70B": ("llama3_1_8B", _70B),
}
"""By title: a preset, and what is changed in its model."""

_ADAPTER = {"rank": 16, "targets": "all-linear"}
ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    f"{title}, {bits}": (preset, {"adapter": _ADAPTER, "model": {**model, **few}})
    for title, (preset, model) in _BASES.items()
    for bits, few in (("bfloat16", {}), ("int4", {"quantization": "int4"}))
}
"""Like `MODELS`: adapters of rank 16 on all linear layers."""

MACHINES: dict[str, tuple[str, int]] = {
    "laptop": ("laptop", 1),
    "RTX 4090": ("rtx4090", 1),
    "H100": ("h100", 1),
    "H200": ("h200", 1),
    "8 × H200": ("h200", 8),
}
"""By title: a machine, and how many of its devices are used."""

FOR_ADAPTERS = ("RTX 4090", "H100")


@dataclass(frozen=True)
class PlannedModelRow:
    """Plan of a published model on a machine; bytes are per device or per host."""

    model: str
    machine: str
    fits: bool
    parameters: int
    data_parallel: int
    tensor_parallel: int
    micro_batch_size: int
    batch: int
    sample_tokens: int
    device_bytes: float
    host_bytes: float
    disk_bytes: float
    kept: dict[str, int]
    seconds: float
    tokens_per_second: float


EVERY = [
    *product(MODELS, MACHINES),
    *product(ADAPTED, FOR_ADAPTERS),
]


def compute_rows(model: str, machine_titles: Sequence[str]) -> list[PlannedModelRow]:
    """Plan and simulate the training of a model on machines of `EVERY`, in turn."""
    rows = list[PlannedModelRow]()
    for _, titles in groupby(machine_titles, lambda title: machine(MACHINES[title][0]).target):
        programs = VariantCache()  # machines of one target share the traced programs
        for title in titles:
            report = plan_model(model, *MACHINES[title], programs)
            rows.append(_row_from_report(model, title, report))
    return rows


def plan_model(
    model: str, machine_name: str, devices: int, programs: VariantCache | None = None
) -> PlanReport:
    """Plan the training of a model on devices of a machine."""
    preset, changes = (MODELS | ADAPTED)[model]
    target = machine(machine_name)
    config = load_finetuning_config(preset, changes)
    ways = list_layouts(config, devices, config.execution.micro_batch_size)
    return plan_best_training(preset, ways, target, programs)


def _row_from_report(model: str, machine_title: str, report: PlanReport) -> PlannedModelRow:
    requirements, e = report.requirements, report.requirements.config.execution
    shares = {name: needed for name, (needed, _) in report.memory_use.items()}
    kinds = [] if requirements.placement is None else requirements.placement.kinds
    return PlannedModelRow(
        model,
        machine_title,
        report.fits,
        requirements.parameters,
        e.data_parallel,
        e.tensor_parallel,
        e.micro_batch_size,
        requirements.samples,
        requirements.tokens // requirements.samples,
        shares.get("device memory", 0),
        shares.get("host memory", shares.get("memory", 0)),
        shares.get("disk", 0),
        {k.label: k.nbytes for k in sorted(kinds, key=lambda k: -k.nbytes) if k.nbytes >= 1e8},
        round(report.expected_seconds, 3),
        round(report.tokens_per_second, 1),
    )


# ---- the document -------------------------------------------------------------------------------
def read_rows() -> list[PlannedModelRow]:
    """Read the rows that were computed earlier, from a JSON file."""
    return [PlannedModelRow(**row) for row in json.loads(NUMBERS.read_text(encoding="utf-8"))]


def rewrite_tables(text: str, rows: Sequence[PlannedModelRow]) -> str:
    """Returns the Markdown document with tables made of these rows of planned models."""
    tables = {
        "models": _model_table,
        "speed": partial(_table_by_machine, cell=_format_speed),
        "memory": partial(_table_by_machine, cell=_format_memory),
        "adapters": partial(
            _table_by_machine, cell=_format_speed_and_memory, models=ADAPTED, machines=FOR_ADAPTERS
        ),
        "measured": _measured_table,
    }
    return _BLOCK.sub(lambda m: f"{m[1]}{tables[m[2]](rows)}{m[3]}", text)


def _model_table(rows: Sequence[PlannedModelRow]) -> str:
    head = ("Model", "Billion parameters", "Samples a step", "Tokens a sample", "Micro-batch")
    of_each = ([row for row in rows if row.model == model] for model in MODELS)
    return format_markdown_table(
        head, (_model_row(model_rows) for model_rows in of_each if model_rows)
    )


def _model_row(rows: Sequence[PlannedModelRow]) -> tuple[str, ...]:
    first, micro = rows[0], sorted({row.micro_batch_size for row in rows if row.fits})
    return (
        first.model,
        f"{first.parameters / 1e9:,.2f}",
        f"{first.batch}",
        f"{first.sample_tokens}",
        "/".join(map(str, micro)),
    )


def _table_by_machine(
    rows: Sequence[PlannedModelRow],
    cell: Callable[[PlannedModelRow], str],
    models: Iterable[str] = MODELS,
    machines: Collection[str] = MACHINES,
) -> str:
    """Returns a Markdown table of training plans: a row per model, a column per machine."""
    by_model_and_machine = {(row.model, row.machine): cell(row) for row in rows}
    models_with_rows = [model for model in models if any(row.model == model for row in rows)]
    cells = (
        (
            model,
            *(by_model_and_machine.get((model, machine_title), "") for machine_title in machines),
        )
        for model in models_with_rows
    )
    return format_markdown_table(("Model", *machines), cells)


def _format_speed(row: PlannedModelRow) -> str:
    return format_two_digits(row.tokens_per_second) if row.fits else "does not fit"


def _format_memory(row: PlannedModelRow) -> str:
    """Returns device/host/disk memory in gigabytes as text, without trailing zeros."""
    sizes = [row.device_bytes, row.host_bytes, row.disk_bytes]
    while sizes[-1] < 1e8:
        sizes.pop()
    return "/".join(f"{n / 1e9:,.1f}" if n >= 1e8 else "0" for n in sizes)


def _format_speed_and_memory(row: PlannedModelRow) -> str:
    return f"{_format_speed(row)} ({_format_memory(row)})" if row.fits else "no"


def _measured_table(_: Sequence[PlannedModelRow]) -> str:
    head = ("Run", "Samples", "Limit", "Resident/planned", "On disk", "Read/written", "Seconds",
            "Without disk", "Disk GB/s", "Matrix rate")  # fmt: skip
    lines = RECORDS.read_text(encoding="utf-8").splitlines()
    records = {facts["command"].split()[3]: facts for facts in map(json.loads, lines)
             if "disk_bytes" in facts}  # fmt: skip
    return format_markdown_table(
        head, (_measured_row(run, records[run]) for run in RUNS if run in records)
    )


def _measured_row(run: str, record: Mapping[str, Any]) -> tuple[str, ...]:
    rate, without_disk = record.get("of_matrix_rate"), record.get("seconds_besides_disk")
    seconds = record.get("seconds_per_step") or record["seconds_per_run"]
    return (
        f"`{run}`",
        str(record.get("samples_per_step") or record["samples_per_run"]),
        f"{record['host_memory']:g}",
        f"{record['peak_host_bytes'] / 1e9:.2f}/{record['planned_host_bytes'] / 1e9:.2f}",
        f"{record['disk_bytes'] / 1e9:.1f}",
        f"{record['disk_read'] / 1e9:.1f}/{record['disk_written'] / 1e9:.1f}",
        f"{seconds:.1f}",
        "" if without_disk is None else f"{without_disk:.1f}",
        f"{record['disk_read_rate'] / 1e9:.1f}" if "disk_read_rate" in record else "",
        "" if rate is None else f"{rate:.0%}",
    )


def compute_missing_rows(rows: Sequence[PlannedModelRow]) -> None:
    """Plan all models and machines except those in the given rows; saves each model at once.

    Each model in a process of its own, which gives back the gigabytes that simulated programs take.
    """
    by_model_and_machine = {(row.model, row.machine): row for row in rows}
    missing: dict[str, list[str]] = {}
    for model, machine_title in EVERY:
        if (model, machine_title) not in by_model_and_machine:
            missing.setdefault(model, []).append(machine_title)
    with ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as pool:
        for model_rows in pool.map(compute_rows, missing, missing.values()):
            by_model_and_machine |= {(row.model, row.machine): row for row in model_rows}
            known = [
                asdict(by_model_and_machine[name]) for name in EVERY if name in by_model_and_machine
            ]
            NUMBERS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
            print(model_rows[0].model, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute missing rows, and write the tables of the document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    all_models = list(dict.fromkeys(model for model, _ in EVERY))
    parser.add_argument("models", nargs="*", metavar="MODEL", help="compute these alone, anew")
    parser.add_argument("--missing", action="store_true", help="compute what there are none of")
    parser.add_argument("--tables", action="store_true", help="compute nothing")
    args = parser.parse_args(arguments)
    if unknown := set(args.models) - set(all_models):
        parser.error(f"there is no {', '.join(sorted(unknown))}: choose of {', '.join(all_models)}")
    if not args.tables:
        known_rows = read_rows() if args.missing or args.models else []
        compute_missing_rows([row for row in known_rows if row.model not in args.models])
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(rewrite_tables(text, read_rows()), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
