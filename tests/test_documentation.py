"""Documents: programs run, commands exist, links and file names resolve."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import docs.plans
from config import presets
from config.base import config_fields
from config.families import FAMILIES
from config.flags import shortest_flag
from config.presets import load_config
from config.sections import RunConfig
from docs.tables import BENCHMARKS, DOCUMENT, rewrite_tables
from terminal.command_line import read_command_line
from tests.data.corpora import few_rows
from tests.pages import PAGES, README, ROOT, blocks, name, prose, text_of
from tests.small_runs import TRAINING

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


# ---- programs -----------------------------------------------------------------------------------
WITH_PROGRAMS = [page for page in PAGES if blocks(page, "python")]


PROGRAMS = """
import runpy, sys

for program in sys.argv[1:]:
    runpy.run_path(program, run_name="__main__")
    print(end="\\0", flush=True)
"""


def test_programs_run(tmp_path):
    """All Python of a page is one program. In a process of their own, since they may define ops."""
    programs = [tmp_path / f"{page.stem}.py" for page in WITH_PROGRAMS]
    for program, page in zip(programs, WITH_PROGRAMS, strict=True):
        program.write_text("\n".join(blocks(page, "python")), encoding="utf-8")
    path = os.pathsep.join([str(ROOT), str(ROOT / "runtime/src")])
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAMS, *programs],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    *outputs, rest = process.stdout.split("\0")
    assert rest == ""
    for page, output in zip(WITH_PROGRAMS, outputs, strict=True):
        assert not output or output in blocks(page, "text"), f"{name(page)} does not show: {output}"


def test_a_page_shows_what_its_program_prints():
    """Else the check above would compare nothing."""
    programs = [(page, "\n".join(blocks(page, "python"))) for page in WITH_PROGRAMS]
    assert any("print(" in program and blocks(page, "text") for page, program in programs)


def walkthrough_losses(output: str) -> tuple[float, float]:
    ((first, last),) = re.findall(r"^loss ([\d.]+) -> ([\d.]+)$", output, re.MULTILINE)
    return float(first), float(last)


@pytest.mark.usefixtures("cached")
def test_the_walkthrough_runs(tmp_path, monkeypatch, capsys):
    """With the programs of the smallest runs, which other tests have too."""
    few_rows(monkeypatch, tmp_path, train=200, validation=64)

    def smallest(*given: Any) -> RunConfig:
        line = read_command_line("", "finetuning", "tiny", [*TRAINING, "--device", "cpu"])
        evaluation = load_config(*given).eval
        return replace(line.config, eval=evaluation)

    monkeypatch.setattr(presets, "load_config", smallest)
    runpy.run_module("docs.walkthrough", run_name="__main__")
    first, last = walkthrough_losses(capsys.readouterr().out)
    assert last < first


@pytest.mark.slow  # its own programs
def test_the_model_learns_in_the_walkthrough(capsys):
    runpy.run_module("docs.walkthrough", run_name="__main__")
    first, last = walkthrough_losses(capsys.readouterr().out)
    assert last < 0.2 * first


# ---- links and names ----------------------------------------------------------------------------
def anchor(heading: str) -> str:
    """Returns GitHub's anchor of a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor(h) for h in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for link in LINK.findall(prose(page)):
        if link.startswith("https://"):
            continue
        target, _, fragment = unquote(link).partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{name(page)} links to {link}"
        if fragment:
            assert fragment in anchors(path), f"{name(page)} links to {link}"


@cache
def file_names() -> set[str]:
    """Returns the names of all files of the repository."""
    tops = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return {path.name for top in tops for path in top.rglob("*") if path.is_file()}


def path_exists(path: str, page: Path) -> bool:
    """True if a path exists from the root or the page's folder; a bare name, anywhere."""
    if (ROOT / path).exists() or (page.parent / path).exists():
        return True
    return "*" in path or ("/" not in path and path in file_names())


RUN_FILES = {
    "best/",
    "config.yml",
    "metrics.jsonl",
    "metrics.damaged.jsonl",
    "owner.json",
    "eval.json",
    "phases.txt",
    "prepared/",
    "packed/",
    "base/",
    "reference/",
    "teacher/",
    "profile/",
    "run.json",
    "tokenizer/",
    "loss_curve.png",
    "machine.yml",
    "record.json",
    "record.md",
    "runs/",
}
FOREIGN_FILES = {
    *("config.json", "generation_config.json", "model.safetensors"),
    *("mine.jsonl", "pairs.jsonl"),
    # Of Graphcore's examples:
    *("config/config.py", "modelling/attention.py", "modelling/t5_lm.py", "modelling/gptj_lm.py"),
    "bs_buffers.png",
}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_it_names_exist(page):
    """File and folder names in code marks exist."""
    if page.name == "CHANGELOG.md":
        return  # it also tells of the past
    named = re.findall(r"`([\w./*-]+(?:\.(?:py|md|yml|txt|toml|json|jsonl|png)|/))`", prose(page))
    ours = {path for path in named if "FAMILY" not in path} - RUN_FILES - FOREIGN_FILES
    missing = [path for path in sorted(ours) if not path_exists(path, page)]
    assert not missing, f"{name(page)} names {missing}"


def test_tests_it_names_exist():
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = {test for page in PAGES for test in re.findall(r"`(test_\w+)`", prose(page))}
    assert {test for test in named if f"def {test}(" not in sources} == set()
    assert len(named) > 10


def test_every_page_is_linked_from_the_readme():
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in LINK.findall(prose(README))}
    assert not set((ROOT / "docs").glob("*.md")) - linked


# ---- tables and numbers -------------------------------------------------------------------------
def test_tables_are_those_of_the_configuration_and_of_the_record():
    for document in (DOCUMENT, BENCHMARKS):
        text = text_of(document)
        assert rewrite_tables(text) == text, "run: python3 -m docs.tables"


def test_every_field_is_in_a_table():
    text = text_of(DOCUMENT)
    tables = set(re.findall(r"<!-- table: (\S+) -->", text))
    sections = {
        "model", "training", "adapter", "execution", "fp8", "checkpoint", "data", "eval",
        "generation",
    }  # fmt: skip
    assert tables == {"presets", "decoders", "missing", *sections, *FAMILIES}
    shown = set(re.findall(r"^`--([\w.]+)[^`]*` \|", text, re.MULTILINE))
    fields = [leaf.path for family in FAMILIES.values() for leaf in config_fields(family.config)]
    assert shown == set(map(shortest_flag, fields))


@pytest.mark.slow  # test_against_references.py has what decides the plan of this preset
def test_plans_are_what_the_planner_says():
    text = text_of(docs.plans.DOCUMENT)
    assert docs.plans.rewrite_plans(text) == text, "run: python3 -m docs.plans"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_nothing_is_left_to_fill_in(page):
    assert not re.findall(r"@@[^@]*@@", text_of(page))
