"""A run that begins with another run's weights does not depend on what becomes of that run."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

import run_export
import run_generation
import run_validation
from checkpoints import load_checkpoint
from checkpoints.step_folders import list_step_folders
from run.records.metrics_jsonl import read_metrics
from tests import small_runs
from tests.run.test_reference_logps import DPO
from tests.small_runs import DECODER_TRAINING, GPTJ, RATE, finetuning

NORMS = ("--training.trainable", "head.norm", "*ln_1")
ADAPTER = ("--adapter.rank", "2", "--adapter.targets", "q_proj", "v_proj")
NEW = ("--checkpoint.load_optimizer", "false")

pytestmark = pytest.mark.usefixtures("few")


def train(folder: Path, *arguments: str) -> int:
    return small_runs.train(folder, *DECODER_TRAINING, *arguments)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("first") / "run"
    assert train(folder, "--steps", "2") == 0
    return folder


@pytest.fixture
def first(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "first"))


def go_on(run: Path) -> None:
    """Delete the steps that there are, as a run does that keeps newer ones."""
    for _, _, path in list_step_folders(run):
        shutil.rmtree(path)


def check_exported(run: Path, out: Path) -> None:
    """An export reads all weights."""
    merged = ("--merge",) if "adapter" in run.name else ()
    assert run_export.main(["--load", str(run), "--save-hf", str(out), *merged]) == 0


def check_usable(run: Path, out: Path, *command: str) -> None:
    """Check that a run is resumed by its command, generates and is exported."""
    assert train(run, *command, "--steps", "6") == 0
    assert len(read_metrics(run / "metrics.jsonl")) == 6
    assert run_generation.main(["--load", str(run), "a lamp"]) == 0
    check_exported(run, out)


def no_links(*_: object) -> NoReturn:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


@pytest.mark.parametrize("links", [True, False], ids=["links", "copies"])
def test_its_owner_deletes_the_step(first, links, tmp_path, monkeypatch) -> None:
    run = tmp_path / "norms"
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    command = ("--load", str(first), *NEW, *NORMS)
    assert train(run, *command, "--steps", "2") == 0
    (kept,) = (run / "base").iterdir()
    (step,) = first.glob("*-step-2")
    shared = (
        [file.name for file in kept.iterdir() if (step / file.name).samefile(file)] if links else []
    )
    assert (len(shared) > 1) == links
    names = set(load_checkpoint(kept).tensors)
    assert any("/" in name for name in names) == links  # a copy has weights alone
    before = {n: load_checkpoint(step).tensors[n] for n in names}
    go_on(first)
    check_usable(run, tmp_path / "out", *command)
    assert run_export.main(["--load", str(kept), "--save-hf", str(tmp_path / "kept")]) == 0
    for name, array in before.items():
        np.testing.assert_array_equal(load_checkpoint(kept).tensors[name], array)


def test_a_run_with_adapters(first, tmp_path, capsys) -> None:
    """Also one that was moved, and one that goes on from it elsewhere."""
    run, other = tmp_path / "adapter", tmp_path / "adapter-elsewhere"
    assert train(run, "--load", str(first), *NEW, *ADAPTER, "--steps", "2") == 0
    go_on(first)
    run = run.rename(tmp_path / "adapter-moved")
    assert train(run, "--load", str(run), "--steps", "4") == 0
    assert f"starting from step 2 in {run}" in capsys.readouterr().err
    assert train(other, "--load", str(run), "--steps", "5") == 0
    shutil.rmtree(run)
    check_exported(other, tmp_path / "out")


def test_steps_that_depend_on_steps(first, tmp_path) -> None:
    """A run that freezes what its start trained, and what that run froze."""
    second, third = tmp_path / "second", tmp_path / "third"
    assert train(second, "--load", str(first), *NEW, *NORMS, "--steps", "2") == 0
    head = ("--training.trainable", "lm_head")
    assert train(third, "--load", str(second), *NEW, *head, "--steps", "2") == 0
    assert len(list((third / "base").iterdir())) == 2
    shutil.rmtree(first)
    shutil.rmtree(second)
    check_exported(third, tmp_path / "out")


def test_a_run_that_starts_over_from_its_own_weights(first, tmp_path) -> None:
    assert train(first, "--load", str(first), *NEW, *NORMS, "--overwrite", "--steps", "2") == 0
    assert len(list((first / "base").iterdir())) == 1
    check_exported(first, tmp_path / "out")
    assert train(first, "--overwrite", "--steps", "1") == 0
    assert not list((first / "base").iterdir())


def test_a_mirror_has_it(first, tmp_path, address, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    run = tmp_path / "adapter"
    command = ("--load", str(first), *NEW, *ADAPTER, "--checkpoint.mirror", address)
    assert train(run, *command, "--steps", "1") == 0
    shutil.rmtree(first)
    shutil.rmtree(run)
    assert run_generation.main(["--load", address, "a lamp"]) == 0


def test_a_mirror_lacks_a_base_that_no_run_saved(first, tmp_path, address, capsys) -> None:
    model, mirrored = tmp_path / "model", ("--checkpoint.mirror", address)
    assert run_export.main(["--load", str(first), "--save-hf", str(model)]) == 0
    assert train(tmp_path / "run", "--load", str(model), *ADAPTER, *mirrored, "--steps", "1") == 0
    assert f"the mirror does not copy {model}, whose weights" in capsys.readouterr().err


def test_a_run_that_trains_all_keeps_nothing(first, tmp_path) -> None:
    assert train(tmp_path / "all", "--load", str(first), *NEW, "--steps", "1") == 0
    assert not (tmp_path / "all/base").exists()


def test_an_adapter_is_exported_without_its_base(first, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    assert train(run, "--load", str(first), *NEW, *ADAPTER, "--steps", "2") == 0
    export = ["--load", str(run), "--save-hf"]
    assert run_export.main([*export, str(tmp_path / "before")]) == 0
    shutil.rmtree(first)
    shutil.rmtree(run / "base")
    assert run_export.main([*export, str(tmp_path / "after")]) == 0
    before, after = (tmp_path / n / "adapter_model.safetensors" for n in ("before", "after"))
    assert before.read_bytes() == after.read_bytes()
    capsys.readouterr()
    assert run_export.main([*export, str(tmp_path / "merged"), "--merge"]) == 2
    assert "--checkpoint.base_model says where they are" in capsys.readouterr().err


def test_the_reference_of_preferences_is_kept(first, tmp_path) -> None:
    """Of a run that trains all weights, too: other data are compared with it later."""
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 8)
    run, data = tmp_path / "run", ("--data.train", str(rows), "--data.packing", "false")
    other = tmp_path / "others.jsonl"
    other.write_text('{"prompt": "d", "chosen": "e", "rejected": "f"}\n' * 8)
    assert train(run, "--load", str(first), *NEW, *DPO, *data, "--steps", "2") == 0
    shutil.rmtree(first)
    assert run_validation.main(["--load", str(run), "--data.validation", str(other)]) == 0


@pytest.mark.slow
def test_processes_keep_it_once(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"

    def run_both(*flags: str) -> None:
        common = (*GPTJ, *RATE, *flags)
        for one in finetuning(2, tmp_path / "executables", *common):
            said = one.communicate(timeout=300)[1]
            assert one.returncode == 0, said

    run_both("--steps", "1", "--save", str(first))
    new = ("--load", str(first), *NEW, *NORMS, "--save", str(second))
    run_both(*new, "--steps", "1")
    assert len(list((second / "base").iterdir())) == 1
    go_on(first)
    run_both(*new, "--steps", "2")
    check_exported(second, tmp_path / "out")
