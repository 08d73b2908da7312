"""The plans shown in docs/planning.md, as the planner prints them.

    python3 -m docs.plans

The first lines of a fine-tuning preset's plan stand there between `<!-- plan: PRESET -->`
and `<!-- end -->`, and simulated steps after `<!-- simulated -->`; this writes them anew. A test
fails where they are out of date.
"""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from config.families import config_class_of
from config.presets import load_config, preset_data
from planning.needs import finetuning_needs
from planning.options import default_machine
from planning.report import report
from planning.simulated import HEAD, Case, row
from planning.text import as_text

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "planning.md"
CASES: tuple[Case, ...] = (
    ("gptj_6B_gpu", "h200", None),
    ("xl_gpu", "h200", None),
    ("xxl_gpu", "h200", 128),
    ("xl_gpu", "rtx4090", None),
)
_TABLE = re.compile(r"(<!-- simulated -->\n).*?(<!-- end -->)", re.DOTALL)
_PLAN = re.compile(r"(<!-- plan: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rewritten(text: str) -> str:
    """The document with all its plans as they should be."""
    return _PLAN.sub(lambda match: f"{match[1]}```text\n{_head(match[2])}\n```\n{match[3]}", text)


def with_table(text: str) -> str:
    """The document with the table of simulated steps as it should be; each in a process of its own,
    which gives back the gigabytes that simulated programs take."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        rows = "\n".join([HEAD, *pool.map(row, CASES)])
    return _TABLE.sub(lambda match: f"{match[1]}{rows}\n{match[2]}", text)


def _head(preset: str) -> str:
    """The facts of the whole, without what was tried and placed."""
    config = load_config(
        config_class_of(preset_data("finetuning", preset), preset), "finetuning", preset
    )
    machine = default_machine(config)
    plan = as_text(report(preset, finetuning_needs(config, machine.target), machine))
    return plan.partition("\nactivations ")[0].partition("\nplacement ")[0].partition("\n\n")[0]


def main() -> None:
    """Write the plans of the document."""
    text = with_table(rewritten(DOCUMENT.read_text(encoding="utf-8")))
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
