"""The command lines of Graphcore's documents on FLAN-T5 and GPT-J, as they are printed: each does
what its document says, or ends in a sentence that says what forces otherwise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import planning.auto_config
from checkpoints import CheckpointStore
from config.families import config_class_of_preset
from config.presets import load_config, load_preset
from config.sections import RunConfig
from files.run_folder import CONFIG
from files.yaml_files import dump_yaml
from modelling.model_family import get_family
from tests.children import PYTHON_PATH
from tests.test_documented_commands import ROOT, SCRIPTS


@dataclass(frozen=True)
class Runs:
    """Expected configuration of a command: devices, and the fields that its document names."""

    family: str
    devices: int = 1
    load: str | None = None
    micro_batch: int | None = None


T5_POD, GPTJ_POD = Runs("t5", 64), Runs("gptj", 64)
NO_PRESET = "xxl_pod64 (of Graphcore's FLAN-T5) or gptj_6B_1024_pod64 (of its GPT-J)"
COMMANDS: list[tuple[str, Runs | str]] = [
    # FLAN-T5
    ("run_finetuning.py --config xl_pod16", Runs("t5", 16, "google/flan-t5-xl")),
    ("run_finetuning.py", NO_PRESET),
    ("run_finetuning.py --save {new}", NO_PRESET),
    ("run_finetuning.py --load {t5}", Runs("t5")),
    ("run_validation.py --load {t5}", Runs("t5", load="{t5}")),
    ("run_validation.py", NO_PRESET),
    ("finetuning.py", T5_POD),
    ("inference.py", T5_POD),
    # GPT-J
    ("run_finetuning_mnli.py --config gptj_6B_1024_pod16", Runs("gptj", 16)),
    ("run_finetuning_mnli.py", NO_PRESET),
    ("run_finetuning_mnli.py --save {new}", NO_PRESET),
    ("run_finetuning_mnli.py --load {gptj}", Runs("gptj")),
    ("run_mnli_validation.py --load {gptj}", Runs("gptj", load="{gptj}")),
    ("run_inference.py", Runs("gptj", load="Graphcore/gptj-mnli", micro_batch=16)),
    (
        "run_inference.py --micro_batch_size 4",
        Runs("gptj", load="Graphcore/gptj-mnli", micro_batch=4),
    ),
    ("finetuning_mnli.py", GPTJ_POD),
]
FORCED = r"error: .*(GB of host memory|GB of device memory|the Hugging Face hub|devices|--config)"
"""Reasons that end a command here: memory, the network, devices, or that nothing is named."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns a saved run of each family, and a folder that does not exist."""
    folder, made = tmp_path_factory.mktemp("founding"), dict[str, str]()
    for family, preset in (("t5", "tiny"), ("gptj", "gptj_tiny")):
        section = config_class_of_preset(load_preset("finetuning", preset), preset)
        config = load_config(section, "finetuning", preset, {"model": {"layers": 1}})
        with CheckpointStore(folder / family) as store:
            weights = get_family(config).weight_map(config).init_weights(0)
            store.save(1, weights, {}, wait=True, texts={CONFIG: dump_yaml(config.to_dict())})
        made[family] = str(folder / family)
    return {**made, "new": str(folder / "new")}


class Understood(Exception):
    """The command line was read, and work on a configuration would begin."""


def begin(config: RunConfig, *_: Any) -> None:
    raise Understood(config)


@pytest.mark.parametrize(("command", "expected"), COMMANDS, ids=[c for c, _ in COMMANDS])
def test_it_does_what_its_document_says(command, expected, folders, monkeypatch, capsys) -> None:
    script, *arguments = command.format(**folders).split()
    main, module, work = SCRIPTS[(ROOT / script).resolve(strict=True).name]
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.setattr(module, work, begin)
    monkeypatch.setattr(planning.auto_config, "resolve_auto_fields", lambda line, *_, **__: line)
    monkeypatch.setenv("POPXL_CACHE_DIR", folders["new"])
    if isinstance(expected, str):
        assert main.main() == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert expected in said
        return
    with pytest.raises(Understood) as found:
        main.main()
    (config,) = found.value.args
    assert (config.family, config.num_replicas) == (expected.family, expected.devices)
    if expected.load is not None:
        assert config.checkpoint.load == expected.load.format(**folders)
    if expected.micro_batch is not None:
        assert config.execution.micro_batch_size == expected.micro_batch


def test_the_requirements_are_there() -> None:
    """`pip3 install -r requirements.txt`."""
    assert (ROOT / "requirements.txt").is_file()
    assert "torch" not in (ROOT / "requirements.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c, _ in COMMANDS if "{" not in c])
def test_it_ends_in_one_sentence_on_this_machine(command: str, tmp_path: Path) -> None:
    """None has the memory of a pod and a network."""
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, "HF_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    *_, last = done.stderr.splitlines()
    assert re.search(FORCED, last), last
