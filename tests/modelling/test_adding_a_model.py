"""docs/adding_a_model.md names what a family touches: a toy family touches just that, and runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from modelling.model_family import ModelFamily
from run.records.metrics_jsonl import read_metrics
from tests.children import WITHOUT_TORCH

ROOT = Path(__file__).parents[2]
TOY = Path(__file__).parent / "toy_family"
PAGE = (ROOT / "docs" / "adding_a_model.md").read_text("utf-8")

LINES = {
    # what the toy adds to files that exist: a line, and the one before it
    "config/families.py": [
        (
            '    "gptj": Family("config.gptj", "GPTJConfig", "modelling.gptj.model"),',
            '    "toy": Family("config.toy", "ToyConfig", "modelling.toy.model"),',
        ),
    ],
}


def documented(title: str) -> list[str]:
    """The files in the first column of the table under a heading."""
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    columns = re.findall(r"^([^|\n]*) \|", section, re.MULTILINE)
    return [name for column in columns for name in re.findall(r"`([\w/.]+)`", column)]


# ---- the page -----------------------------------------------------------------------------------
def test_every_file_that_the_page_names_is_there():
    named = set(re.findall(r"`([\w/.]+/[\w]+\.(?:py|yml))`", PAGE))
    missing = [name for name in named if not (ROOT / name.replace("FAMILY", "gptj")).is_file()]
    assert missing == []


def test_the_page_names_every_file_of_gptj():
    named = {name.replace("FAMILY", "gptj") for name in re.findall(r"`(modelling/[\w/.]+)`", PAGE)}
    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "modelling/gptj").glob("*.py")}
    assert own <= named


def test_the_pages_example_is_the_toy():
    (example,) = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    assert example == (TOY / "modelling/toy/model.py").read_text("utf-8")


def test_the_page_names_every_field_of_the_record():
    assert documented("The record") == [f.name for f in fields(ModelFamily)]


# ---- the toy family -----------------------------------------------------------------------------
def sources(root: Path) -> dict[str, str]:
    """Texts of the application's files, but the data."""
    found = [*root.glob("*.py"), *root.glob("*/**/*.py"), *root.glob("config/*.yml")]
    return {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in found}


def copy_application(root: Path) -> None:
    for package in ROOT.glob("*/__init__.py"):
        name = package.parent.name
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for script in ROOT.glob("*.py"):
        shutil.copy(script, root)
    corpus = root / "data/sample/train.jsonl"  # reading all of it takes longer than training
    corpus.write_text("\n".join(corpus.read_text("utf-8").splitlines()[:1000]), "utf-8")


def add_toy(root: Path) -> None:
    """Add the toy's files, its presets at the ends of the others', and its lines."""
    for path in TOY.rglob("*.*"):
        target = root / path.relative_to(TOY)
        if path.suffix in (".py", ".yml"):
            target.parent.mkdir(exist_ok=True)
            with target.open("a", encoding="utf-8") as file:
                file.write(path.read_text("utf-8"))
    for name, additions in LINES.items():
        text = (root / name).read_text("utf-8")
        for before, line in additions:
            assert text.count(before + "\n") == 1
            text = text.replace(before + "\n", f"{before}\n{line}\n")
        (root / name).write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def application(tmp_path_factory) -> tuple[Path, set[str]]:
    """A copy of the application with the toy in it, and the files that have changed."""
    root = tmp_path_factory.mktemp("application")
    copy_application(root)
    before = sources(root)
    add_toy(root)
    after = sources(root)
    return root, {name for name, text in after.items() if before.get(name) != text}


def test_the_toy_touches_the_files_that_the_page_names_and_no_other(application):
    _, touched = application
    named = documented("What every family has")
    assert touched == {name.replace("FAMILY", "toy") for name in named}


def test_the_scripts_train_save_and_validate_the_toy(application):
    """`--config toy_tiny` is all it takes."""
    root, _ = application
    commands = (
        "import run_finetuning, run_validation; "
        "common, few = ['--device', 'cpu'], ['--eval.samples', '40']; "
        "preset = ['--config', 'toy_tiny', '--save', 'saved', '--run-dir', 'run']; "
        "assert run_finetuning.main([*common, *preset]) == 0; "
        "assert run_validation.main([*common, *few, '--load', 'saved', '--out', 'run']) == 0"
    )
    path = os.pathsep.join(map(str, (root, ROOT / "runtime/src", WITHOUT_TORCH)))
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", commands],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    losses = [row["loss"] for row in read_metrics(root / "run" / "metrics.jsonl")]
    assert len(losses) == 40
    assert losses[-1] < losses[0] / 2
    report = json.loads((root / "run" / "eval.json").read_text("utf-8"))
    assert (report["step"], report["total"]) == (40, 40)
    assert done.stdout.startswith("accuracy: ")
    assert report["perplexity"] > 1
