"""Files that somebody writes to while a run starts: what has a digest is what was used."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import run.resume
from checkpoints import CheckpointError, TensorFiles, load_checkpoint
from checkpoints.safetensors_files import sha256_of_array
from run.frozen_outputs import FrozenModel
from run.weight_checks import check_digests
from tests import small_runs
from tests.run.test_frozen_base import MODEL, NORMS, TRAINING, WEIGHTS
from tests.run.test_reference_logps import DPO
from tests.small_runs import GPTJ, RATE, finetuning, random_model

pytestmark = pytest.mark.usefixtures("few")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model") / "base", *MODEL)


@pytest.fixture
def base(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "base"))


def rewrite(base: Path) -> None:
    """Write other values into the file, which stays the same one."""
    content = bytearray((base / WEIGHTS).read_bytes())
    content[-400::4] = bytes(byte ^ 1 for byte in content[-400::4])
    with (base / WEIGHTS).open("r+b") as file:
        file.write(content)


def before(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, action: Callable[[], object]
) -> None:
    """Do something before a function."""
    function = getattr(owner, name)

    def called(*arguments: Any) -> Any:
        action()
        return function(*arguments)

    monkeypatch.setattr(owner, name, called)


def test_a_base_that_is_rewritten_after_it_was_read(base, model, tmp_path, monkeypatch) -> None:
    run_folder = tmp_path / "run"
    before(monkeypatch, run.resume, "base_model_metadata", lambda: rewrite(base))
    assert small_runs.train(
        run_folder, *TRAINING, *NORMS, "--load", str(base), "--steps", "2"
    ) == 0  # fmt: skip
    used = load_file(model / WEIGHTS)
    recorded: Mapping[str, str] = load_checkpoint(run_folder).metadata["base"]["sha256"]
    assert recorded == {name: sha256_of_array(used[name]) for name in recorded}
    assert any(
        sha256_of_array(a) != sha256_of_array(used[n]) for n, a in load_file(base / WEIGHTS).items()
    )


def test_a_reference_of_weights_that_are_rewritten(base, tmp_path, monkeypatch, capsys) -> None:
    """Between their digest and the pass."""
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 8)
    data = ("--data.train", str(rows), "--data.packing", "false", *DPO)
    before(monkeypatch, FrozenModel, "_compute", lambda: rewrite(base))
    command = (*TRAINING, *data, "--load", str(base), "--steps", "2")
    assert small_runs.train(tmp_path / "run", *command) == 2
    assert "has changed while the run started" in capsys.readouterr().err


def test_a_tensor_is_what_it_was_at_first() -> None:
    tensors = {name: np.arange(n, n + 4) for n, name in enumerate("abc")}
    watched = check_digests(tensors, "here", ["a"])
    assert watched["b"] is tensors["b"]
    assert watched["a"] is tensors["a"]
    assert watched.sha256 == {"a": sha256_of_array(tensors["a"])}
    assert watched.digests(["a", "c"]) == {name: sha256_of_array(tensors[name]) for name in "ac"}
    tensors |= {name: array + 1 for name, array in tensors.items()}
    assert watched["b"] is tensors["b"]
    for name in "ac":
        with pytest.raises(CheckpointError, match=f"{name} of here has changed while the run"):
            watched[name]


def test_a_tensor_with_a_digest_is_read_whole(base: Path) -> None:
    """Others are read in parts, where they can be."""
    read = []

    class Files(TensorFiles):
        def read_shards(self, name: str, wanted: Any) -> np.ndarray:
            read.append(name)
            return super().read_shards(name, wanted)

    first, second, *_ = files = Files([base / WEIGHTS])
    watched = check_digests(files, "here", [first])
    for name in (first, second):
        np.testing.assert_array_equal(watched.read_shards(name, ())[:0], files[name][:0])
    assert read == [second]
    assert watched.sha256 == {first: sha256_of_array(files[first])}


@pytest.mark.slow
def test_processes_record_what_all_have_read(tmp_path: Path) -> None:
    flags = (*GPTJ, *RATE, "--steps", "1", "--training.trainable", "*ln_1")
    base = random_model(tmp_path / "base", *GPTJ[:8])
    for one in finetuning(2, tmp_path / "executables", *flags, "--load", str(base),
                          "--save", str(tmp_path / "run")):  # fmt: skip
        said = one.communicate(timeout=300)[1]
        assert one.returncode == 0, said
    used = load_file(base / WEIGHTS)
    recorded = load_checkpoint(tmp_path / "run").metadata["base"]["sha256"]
    assert recorded.keys() == {name for name in used if "ln_1" not in name}
    assert recorded == {name: sha256_of_array(used[name]) for name in recorded}
