"""The documentation tells the truth: programs run, commands exist, links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import benchmarks.finetuning
import benchmarks.inference
import benchmarks.phased
import docs.plans
import evaluation.generate
import evaluation.validate
import huggingface.export
import huggingface.side_by_side
import planning.options
import popdist
import run_finetuning
import run_generation
import run_inference
import run_validation
import training.finetune
from checkpoints.origins import SavedOrModel
from config.families import FAMILIES
from config.presets import preset_data
from docs.tables import DOCUMENTS, rewritten
from tests.small_runs import COMPILE_QUICKLY

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("data/*.md"),
                *ROOT.glob("runtime/*.md"), *ROOT.glob("benchmarks/*.md")])  # fmt: skip
README = ROOT / "README.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in BLOCK.findall(text_of(page)) if found == language]


def prose(page: Path) -> str:
    return BLOCK.sub("", text_of(page))


# ---- programs -----------------------------------------------------------------------------------
WITH_PROGRAMS = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=name)
def test_programs_run(page, tmp_path):
    """All Python of a page is one program. In a process of its own, since it may define ops."""
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks(page, "python")), encoding="utf-8")
    path = os.pathsep.join([str(ROOT), str(ROOT / "runtime/src")])
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    if done.stdout:
        assert done.stdout in blocks(page, "text"), f"the page does not show: {done.stdout}"


def test_a_page_shows_what_its_program_prints():
    """Else the check above would compare nothing."""
    programs = [(page, "\n".join(blocks(page, "python"))) for page in WITH_PROGRAMS]
    assert any("print(" in program and blocks(page, "text") for page, program in programs)


def test_the_walkthrough_runs():
    """And the model learns in it."""
    done = subprocess.run(
        [sys.executable, "-m", "docs.walkthrough"],
        env={
            **os.environ,
            **COMPILE_QUICKLY,
            "PYTHONPATH": str(ROOT / "runtime/src"),
            "HF_HUB_OFFLINE": "1",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    ((first, last),) = re.findall(r"^loss ([\d.]+) -> ([\d.]+)$", done.stdout, re.MULTILINE)
    assert float(last) < 0.2 * float(first)


# ---- commands -----------------------------------------------------------------------------------
def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command in the page's shell blocks, without variables set before it."""
    for block in blocks(page, "bash"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                del words[0]
            if words:
                yield words


COMMANDS = [
    pytest.param(words, id=f"{name(page)}: {shlex.join(words)}")
    for page in PAGES
    for words in commands(page)
]
SCRIPTS = {
    # the script: the module of its main, and the module and function that would do the work
    "run_finetuning.py": (run_finetuning, training.finetune, "finetune"),
    "run_validation.py": (run_validation, evaluation.validate, "validate"),
    "run_inference.py": (run_inference, huggingface.side_by_side, "side_by_side"),
    "run_generation.py": (run_generation, evaluation.generate, "is_raw"),
    "huggingface.export": (huggingface.export, huggingface.export, "check_least"),
    "finetuning.py": (benchmarks.finetuning, benchmarks.finetuning, "measure"),
    "inference.py": (benchmarks.inference, benchmarks.inference, "measure"),
    "benchmarks.finetuning": (benchmarks.finetuning, benchmarks.finetuning, "measure"),
    "benchmarks.inference": (benchmarks.inference, benchmarks.inference, "measure"),
    "benchmarks.phased": (benchmarks.phased, benchmarks.phased, "measure_all"),
}


class Understood(Exception):
    """The command line was read, and work would begin."""


def begin(*_: object, **__: object) -> None:
    raise Understood


class OfPresets(SavedOrModel):
    """Takes models of the hub and runs that are not there for what the presets say."""

    def with_model(self, name: str, data: Mapping[str, Any] | None) -> Mapping[str, Any]:
        return data or preset_data("finetuning", "small")


def check_script(script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    runs, module, work = SCRIPTS[script]
    monkeypatch.setattr(runs, "ORIGINS", OfPresets(), raising=False)
    monkeypatch.setattr(module, work, begin)
    monkeypatch.setattr(planning.options, "machine", begin)  # what a plan looks up first
    monkeypatch.setattr(popdist, "init", lambda *_: None)  # nobody comes
    with pytest.raises(SystemExit if "--help" in arguments else Understood):
        runs.main(arguments)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", text_of(ROOT / "Makefile"), re.MULTILINE))


def started_program(words: list[str]) -> list[str]:
    """What a launcher starts in several processes; other commands as they are."""
    launcher = words[:3] == ["python3", "-m", "popdist.run"]
    if words[0] in ("mpirun", "srun") or launcher:
        return words[words.index("python3", 3 if launcher else 0) :]
    return words


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_exist(words, monkeypatch):
    """Scripts take the flags and presets, make has the targets, files are there."""
    program, *arguments = started_program(words)
    program = program.removeprefix(".venv/bin/")
    if program == "make":
        assert {a for a in arguments if "=" not in a} <= make_targets()
    elif program in ("python", "python3") and arguments[0] in SCRIPTS:
        check_script(arguments[0], arguments[1:], monkeypatch)
    elif program in ("python", "python3") and arguments[:1] == ["-m"]:
        module, *rest = arguments[1:]
        if module in SCRIPTS:
            check_script(module, rest, monkeypatch)
        elif module not in ("venv", "pip", "pytest"):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
    elif program == "pip":
        files = [a for a in arguments if a.endswith(".txt") or a.startswith("./")]
        assert files
        assert all((ROOT / file).exists() for file in files)
    else:
        assert program == ".", f"what is {program}?"


# ---- the commands, run ---------------------------------------------------------------------------
RUN_PAGES = (README, ROOT / "docs" / "own_task.md")
CHEAP = {
    "run_finetuning.py": [
        *("--steps", "2", "--layers", "1", "--hidden_size", "32", "--global_batch_size", "8"),
        *("--micro_batch_size", "4", "--device", "cpu", "--evaluation.samples", "8"),
    ],
    "run_validation.py": ["--evaluation.samples", "8"],
    "run_generation.py": [],
    "run_inference.py": [],
    "huggingface.export": [],
}


def cheap_command(words: list[str]) -> list[str] | None:
    """A command of a page with few steps and a small model; None if it needs the hub or no run."""
    text = shlex.join(words)
    if words[0] != "python3" or "google/" in text or "--plan" in words:
        return None
    module = words[1] == "-m"
    script, arguments = words[2 if module else 1], words[3 if module else 2 :]
    if script not in CHEAP:
        return None
    if script == "run_finetuning.py" and "--config" not in words:
        return None
    few = [a for a in arguments if a not in ("--evaluation.samples", "320")]
    steps = ["--steps", "10"] if "--profile" in words else []  # as many as a profile takes
    return [*(["-m"] if module else []), script, *few, *CHEAP[script], *steps]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_PAGES, ids=name)
def test_commands_run(page, tmp_path):
    """In their order, in a copy of the folder they are given in."""
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git"):
            (tmp_path / path.name).symlink_to(path)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime/src")]),
        "POPXL_CACHE_DIR": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    count = 0
    if page != README:  # the page supposes the demo's run
        first = next(w for w in commands(README) if "runs/tiny" in w)
        assert run(cheap_command(first) or [], tmp_path, environment) == ""
    for words in commands(page):
        command = cheap_command(words)
        if command is not None:
            assert run(command, tmp_path, environment) == "", shlex.join(words)
            count += 1
    assert count >= 5


def run(command: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    """What a failing command says; nothing if it does not fail."""
    done = subprocess.run(
        [sys.executable, *command],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    return done.stderr if done.returncode else ""


# ---- links and names ----------------------------------------------------------------------------
def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
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
    """The names of all files of ours."""
    tops = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return {path.name for top in tops for path in top.rglob("*") if path.is_file()}


def is_there(path: str, page: Path) -> bool:
    """Whether a path that a page mentions exists, from the root or beside the page; a name alone,
    anywhere."""
    if (ROOT / path).exists() or (page.parent / path).exists():
        return True
    return "*" in path or ("/" not in path and path in file_names())


WRITTEN_BY_RUNS = {
    "best/",
    "config.yml",
    "metrics.jsonl",
    "metrics.damaged.jsonl",
    "validation.json",
    "phases.txt",
    "profile/",
    "loss_curve.png",
    "runs/",
}
OF_OTHERS = {"config.json", "mine.jsonl", "generation_config.json", "model.safetensors"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_it_names_exist(page):
    """What stands in code marks and looks like a file or folder of ours is one."""
    if page.name == "CHANGELOG.md":
        return  # it also tells of the past
    named = re.findall(r"`([\w./*-]+(?:\.(?:py|md|yml|txt|toml|json|jsonl|png)|/))`", prose(page))
    ours = {path for path in named if "FAMILY" not in path} - WRITTEN_BY_RUNS - OF_OTHERS
    missing = [path for path in sorted(ours) if not is_there(path, page)]
    assert not missing, f"{name(page)} names {missing}"


def test_every_page_is_linked_from_the_readme():
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in LINK.findall(prose(README))}
    assert not set((ROOT / "docs").glob("*.md")) - linked


# ---- tables and numbers -------------------------------------------------------------------------
@pytest.mark.parametrize("page", DOCUMENTS, ids=name)
def test_tables_are_those_of_the_configuration(page):
    assert rewritten(text_of(page)) == text_of(page), "run: python3 -m docs.tables"


def test_every_field_is_in_a_table():
    tables = set(re.findall(r"<!-- table: (\S+) -->", "".join(map(text_of, DOCUMENTS))))
    sections = {
        "model", "training", "execution", "fp8", "checkpoint", "data", "evaluation", "generation",
    }  # fmt: skip
    assert tables == {"presets", *sections, *FAMILIES}


def test_plans_are_what_the_planner_says():
    for page in docs.plans.DOCUMENTS:
        assert docs.plans.rewritten(text_of(page)) == text_of(page), "run: python3 -m docs.plans"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_nothing_is_left_to_fill_in(page):
    assert not re.findall(r"@@[^@]*@@", text_of(page))
