"""Commands of the documents parse and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import finetuning
import inference
import planning.auto_config
import planning.plan_options
import popdist
import run.answers.generate
import run.evaluation.compare_with_hf
import run.evaluation.evaluate_checkpoint
import run.generation_throughput
import run.hf_export
import run.training_loop
import run.training_throughput
import run_export
import run_finetuning
import run_generation
import run_inference
import run_validation
from config.presets import load_preset
from planning.config_loader import RunOrModelLoader
from tests.children import child, free_port
from tests.huggingface.hub_folders import save, save_bin
from tests.pages import PAGES, ROOT, Command, commands, name, text_of

# ---- they are understood ------------------------------------------------------------------------
COMMANDS = {
    f"{name(page)}: {command.text}": command.words for page in PAGES for command in commands(page)
}
SCRIPTS = {
    # the script: the module of its main, and the module and function that would do the work
    "run_finetuning.py": (run_finetuning, run.training_loop, "finetune"),
    "run_validation.py": (
        run_validation,
        run.evaluation.evaluate_checkpoint,
        "evaluate_checkpoint",
    ),
    "run_inference.py": (run_inference, run.evaluation.compare_with_hf, "compare_with_hf"),
    "run_generation.py": (run_generation, run.answers.generate, "resolve_prompt_format"),
    "run_export.py": (run_export, run.hf_export, "check_lower_bound"),
    "finetuning.py": (finetuning, run.training_throughput, "measure_throughput"),
    "inference.py": (inference, run.generation_throughput, "measure_throughput"),
}


class Understood(Exception):
    """The command line was read, and work would begin."""


def begin(*_: object, **__: object) -> None:
    raise Understood


class PresetLoader(RunOrModelLoader):
    """Loads presets in place of hub models and runs that do not exist."""

    def from_load(self, load: str) -> Mapping[str, Any] | None:
        return None

    def from_model(self, name: str) -> Mapping[str, Any]:
        return load_preset("finetuning", "qwen3_tiny" if "qwen3" in name else "small")


def check_script(script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    runs, module, work = SCRIPTS[script]
    monkeypatch.setattr(runs, "CONFIG_LOADER", PresetLoader(), raising=False)
    monkeypatch.setattr(
        runs, "check_task_and_files", lambda data: None, raising=False
    )  # nobody's files
    monkeypatch.setattr(module, work, begin)
    monkeypatch.setattr(planning.plan_options, "machine", begin)  # what a plan looks up first
    monkeypatch.setattr(popdist, "init", lambda *_: None)  # nobody comes
    monkeypatch.setattr(planning.auto_config, "resolve_auto_fields", lambda line, *_, **__: line)
    with pytest.raises(SystemExit if "--help" in arguments else Understood):
        runs.main(arguments)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", text_of(ROOT / "Makefile"), re.MULTILINE))


def launched_command(words: list[str]) -> list[str]:
    """Returns the command that a launcher starts; other commands unchanged."""
    launcher = words[:3] == ["python3", "-m", "popdist.run"]
    if words[0] in ("mpirun", "srun") or launcher:
        return words[words.index("python3", 3 if launcher else 0) :]
    return words


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_commands_exist(words, monkeypatch):
    """Scripts take the flags and presets, make has the targets, files are there."""
    program, *arguments = launched_command(words)
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


# ---- they run -----------------------------------------------------------------------------------
QUICK = {
    "model": {"layers": 1, "hidden_size": 64},
    "training": {"steps": 10},
    "eval": {"samples": 16},
}
"""Over the presets that need no network, in the copy of the repository where commands run."""

FEWER = {
    "benchmarks.compile": ["--rounds", "1"],
    "benchmarks.distillation": ["--teacher_steps", "2", "--steps", "2", "--seeds", "1"],
    "benchmarks.accumulation": ["--processes", "2", "--counts", "1", "2", "--steps", "2"],
    "benchmarks.vs_huggingface": ["--rounds", "1"],
    "benchmarks.low_precision": ["--seeds", "42", "--steps", "10"],
}
"""What follows a command, so that it measures less. Of an option that is given twice, the last one
counts."""

WHOLE_MODELS = {"benchmarks.disk_offload", "benchmarks.kill_and_resume", "benchmarks.real_weights"}
"""They take gigabytes and minutes, and have tests with small models."""
NOT_HERE = {"pip", "venv", ".", "make", "pytest", "srun", *WHOLE_MODELS}
"""Installing needs a network, these are tests themselves, and Slurm is for clusters."""

MEETING_PLACE = "10.0.0.1:9000"
PLACEHOLDERS = {
    "google/flan-t5-small": "hub",
    "google/flan-t5-base": "hub",
    "my-model": "hub",
    "FOLDER": "old",
    "NEW": "new",
    "DIR": ".",
}
"""Words of commands, and folders that stand in for them."""


def can_run(words: Sequence[str]) -> bool:
    program = words[2] if words[1:2] == ["-m"] else words[0]
    return program not in NOT_HERE and shutil.which(words[0]) is not None


def localize(command: Command, address: str) -> Command:
    """Returns the command with local folders and addresses."""
    places = PLACEHOLDERS | {MEETING_PLACE: address}
    variables = {name: places.get(value, value) for name, value in command.variables.items()}
    return Command([places.get(word, word) for word in command.words], variables)


def shorten(words: list[str]) -> list[str]:
    """Returns the words of a command with quick presets and fewer measurements."""
    if "--config" in words and "--plan" not in words:
        place = words.index("--config") + 1
        kind = words[place].partition("_")[0]
        words[place] = f"{kind}_tiny" if kind in ("gptj", "qwen3") else "tiny"
    if "--model" in words:  # its preset is one for models of the hub, and not quick
        words += ["--steps", "4"]
    if "--record" in words:  # of a machine with a GPU: no time for any task
        words += ["--minutes", "0.1"]
    if words[0] == "mpirun":  # it follows the same command with another launcher
        words.append("--overwrite")
    return words + [extra for module in FEWER if module in words for extra in FEWER[module]]


def copy_of_repository(folder: Path) -> None:
    """Copy the repository with quick presets, a hub model in two forms, and a file of rows."""
    tops = {Path(line).parts[0] for line in _tracked()}
    for path in (ROOT / top for top in sorted(tops)):
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, folder / path.name, ignore=ignored)
        else:
            shutil.copy(path, folder)
    presets = folder / "config" / "finetuning.yml"
    data = yaml.safe_load(presets.read_text(encoding="utf-8"))
    for preset in ("tiny", "gptj_tiny", "qwen3_tiny"):
        for section, fields in QUICK.items():
            data[preset].setdefault(section, {}).update(fields)
    presets.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    save("t5", folder / "hub")
    save_bin("t5", folder / "old")
    rows = [f'{{"question": "Is {n} even?", "answer": "{n % 2 == 0}"}}\n' for n in range(64)]
    (folder / "mine.jsonl").write_text("".join(rows), encoding="utf-8")
    pairs = "".join(rows).replace("question", "prompt").replace("answer", "completion")
    (folder / "pairs.jsonl").write_text(pairs, encoding="utf-8")


def _tracked() -> list[str]:
    """Returns tracked files; without git, all but generated folders."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    made = ("runs", ".venv", ".git")
    return done.stdout.split() or [p.name for p in ROOT.iterdir() if p.name not in made]


@pytest.fixture(scope="module")
def executables(tmp_path_factory) -> Path:
    """Returns a folder of executables that all pages share."""
    return tmp_path_factory.mktemp("executables")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(can_run(c.words) for c in commands(page))], ids=name
)
def test_commands_run(page, tmp_path, executables):
    """In their order, each with its own words but for presets and what `FEWER` adds. Hosts that
    meet run at the same time."""
    copy_of_repository(tmp_path)
    address, meeting = f"127.0.0.1:{free_port()}", dict[str, subprocess.Popen[str]]()
    for command in commands(page):
        if not can_run(command.words):
            continue
        meeting[command.text] = start(localize(command, address), tmp_path, executables)
        if MEETING_PLACE in command.words and len(meeting) == 1:
            continue  # the other host's command follows
        for text, process in meeting.items():
            said = process.communicate()[1]
            assert process.returncode == 0, f"{text}\n{said}"
        meeting.clear()


def start(command: Command, folder: Path, executables: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        **command.variables,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(folder / "runtime" / "src"),
        "POPXL_CACHE_DIR": str(executables),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    return child(
        shorten(command.words), env=environment, cwd=folder,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
