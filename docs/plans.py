"""Write the plans shown in docs/planning.md, with the planner's current output.

    python3 -m docs.plans

The first lines of a plan stand there between `<!-- plan: PRESET on COUNT MACHINE -->` and
`<!-- end -->`, simulated steps after `<!-- simulated -->`, and those of many devices after
`<!-- layouts -->`; this writes them anew. A test fails where they are out of date.
"""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from planning.program_variants import VariantCache
from planning.report_text import format_report
from planning.simulated_step_times import (
    LAYOUT_TABLE_HEAD,
    STEP_TABLE_HEAD,
    StepCase,
    layout_table_row,
    plan_best_layout,
    step_table_row,
)
from planning.speed_advice import with_speed_advice

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "planning.md"
CASES: tuple[StepCase, ...] = (
    ("gptj_6B_gpu", "h200", None),
    ("xl_gpu", "h200", None),
    ("xxl_gpu", "h200", 128),
    ("xl_gpu", "rtx4090", None),
)
LAYOUTS = tuple(
    (preset, "h100", devices)
    for preset in ("xl_gpu", "gptj_6B_gpu", "llama3_1_8B", "xxl_gpu")
    for devices in (1, 8, 64)
)
_LAYOUTS = re.compile(r"(<!-- layouts -->\n).*?(<!-- end -->)", re.DOTALL)
_TABLE = re.compile(r"(<!-- simulated -->\n).*?(<!-- end -->)", re.DOTALL)
_PLAN = re.compile(r"(<!-- plan: (\S+) on (\d+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rewrite_plans(text: str) -> str:
    """Returns the Markdown document with its plans up to date."""

    def plan(match: re.Match[str]) -> str:
        summary = _plan_summary(match[2], int(match[3]), match[4])
        return f"{match[1]}```text\n{summary}\n```\n{match[5]}"

    return _PLAN.sub(plan, text)


def rewrite_tables(text: str) -> str:
    """Returns the Markdown document with its tables of simulated steps up to date.

    Each step has a process of its own, which frees the gigabytes that simulated programs take.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        rows = "\n".join([STEP_TABLE_HEAD, *pool.map(step_table_row, CASES)])
        layout_rows = "\n".join([LAYOUT_TABLE_HEAD, *pool.map(layout_table_row, LAYOUTS)])
    text = _TABLE.sub(lambda match: f"{match[1]}{rows}\n{match[2]}", text)
    return _LAYOUTS.sub(lambda match: f"{match[1]}{layout_rows}\n{match[2]}", text)


def _plan_summary(preset: str, devices: int, machine: str) -> str:
    """Returns the first lines of a preset's plan on a machine, without the placement."""
    programs = VariantCache()
    report = with_speed_advice(plan_best_layout(preset, machine, devices, programs), programs)
    return format_report(report).partition("\nplacement ")[0]


def main() -> None:
    """Update the plans and tables of docs/planning.md."""
    text = rewrite_tables(rewrite_plans(DOCUMENT.read_text(encoding="utf-8")))
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
