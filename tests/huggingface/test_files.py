"""Files of models as they lie around: pointers, bin files, copies, an index that does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file

import huggingface.convert
from config.errors import UserError
from data.file_readers import read_rows
from huggingface.hub import load_tokenizer
from huggingface.model_folders import read_hf_config, read_hf_directory
from huggingface.pretrained import get_local_folder
from tests.data.corpora import SAMPLE_FOLDER
from tests.huggingface.published import make_folder
from tests.huggingface.test_published import ours

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:5f\nsize 24207819307\n"


@pytest.mark.parametrize(
    ("file", "read"),
    [
        ("config.json", read_hf_config),
        ("model.safetensors", read_hf_directory),
        ("model.safetensors.index.json", read_hf_directory),
        ("pytorch_model.bin", read_hf_directory),
        ("pytorch_model.bin.index.json", read_hf_directory),
        ("tokenizer.json", lambda folder: load_tokenizer(str(folder))),
        ("spiece.model", lambda folder: load_tokenizer(str(folder))),
        ("vocab.json", lambda folder: load_tokenizer(str(folder))),
        ("merges.txt", lambda folder: load_tokenizer(str(folder))),
        ("rows.jsonl", lambda folder: list(read_rows(folder / "rows.jsonl"))),
        ("rows.csv", lambda folder: list(read_rows(folder / "rows.csv"))),
        ("rows.txt", lambda folder: list(read_rows(folder / "rows.txt"))),
        ("rows.parquet", lambda folder: list(read_rows(folder / "rows.parquet"))),
        ("rows.jsonl.gz", lambda folder: list(read_rows(folder / "rows.jsonl.gz"))),
    ],
)
def test_a_pointer_of_git_lfs_is_named(file: str, read: Any, tmp_path: Path) -> None:
    (tmp_path / file).write_text(POINTER)
    with pytest.raises(UserError) as caught:
        read(tmp_path)
    said = str(caught.value)
    assert f"{tmp_path / file} is a pointer of git-lfs, not the file itself: run" in said
    assert "\n" not in said


# ---- bin files -----------------------------------------------------------------------------------
def save_bin(tensors: dict[str, torch.Tensor], folder: Path, files: int, zipped: bool) -> None:
    (folder / "model.safetensors").unlink()
    names = [f"pytorch_model-{i + 1:05}-of-{files:05}.bin" for i in range(files)]
    names = ["pytorch_model.bin"] if files == 1 else names
    placed = {name: names[i % files] for i, name in enumerate(tensors)}
    for name in names:
        part = {n: x for n, x in tensors.items() if placed[n] == name}
        torch.save(part, folder / name, _use_new_zipfile_serialization=zipped)
    if files > 1:
        index = {"metadata": {}, "weight_map": placed}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(("files", "zipped"), [(1, True), (1, False), (3, True)])
@pytest.mark.parametrize("name", ["EleutherAI/gpt-j-6b", "google/mt5-small", "ykilcher/gpt-4chan"])
def test_bin_files_are_read_as_safetensors(
    name: str, files: int, zipped: bool, tmp_path: Path
) -> None:
    tensors = make_folder(name, tmp_path)
    expected = ours(tmp_path)
    if name == "EleutherAI/gpt-j-6b":  # whose masks are one storage
        masks = [n for n in tensors if n.endswith("attn.bias")]
        tensors |= dict.fromkeys(masks, tensors[masks[0]])
    save_bin(tensors, tmp_path, files, zipped)
    found = ours(tmp_path)
    assert expected.keys() == found.keys()
    assert all(np.array_equal(found[n], x) for n, x in expected.items())


def test_the_types_and_the_fingerprint_of_bin_files(tmp_path: Path) -> None:
    tensors = make_folder("ykilcher/gpt-4chan", tmp_path)
    of_safetensors = read_hf_directory(tmp_path)
    specs = {name: of_safetensors.spec(name) for name in of_safetensors}
    other = of_safetensors.fingerprint()
    save_bin(tensors, tmp_path, 1, True)
    files = read_hf_directory(tmp_path)
    assert {name: files.spec(name) for name in files} == specs
    assert files.fingerprint() == read_hf_directory(tmp_path).fingerprint()
    assert files.fingerprint() != other


# ---- an index that does not fit ------------------------------------------------------------------
def with_index(folder: Path, tensors: dict[str, torch.Tensor], more: Iterable[str]) -> None:
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model-00001-of-00001.safetensors")
    named = dict.fromkeys([*tensors, *more], "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": named}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_an_index_may_name_copies_that_no_file_has(tmp_path: Path) -> None:
    """As FLAN-T5 XL's."""
    tensors = make_folder("google/flan-t5-large", tmp_path)
    expected = ours(tmp_path)
    copies = [f"{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")]
    with_index(tmp_path, tensors, copies)
    assert ours(tmp_path).keys() == expected.keys()
    assert set(read_hf_directory(tmp_path).missing) == set(copies)


def test_what_an_index_names_and_its_file_lacks_is_said(tmp_path: Path) -> None:
    tensors = make_folder("meta-llama/Llama-3.2-1B-Instruct", tmp_path)
    lost = "model.layers.1.mlp.down_proj.weight"
    del tensors[lost]
    with_index(tmp_path, tensors, [lost])
    with pytest.raises(UserError, match=f"names {lost} in model-00001.*: download that file again"):
        ours(tmp_path)


def test_a_conversion_says_what_no_file_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = make_folder("google/mt5-small", tmp_path)
    expected = ours(tmp_path)
    save_bin(tensors, tmp_path, 2, True)
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    index["weight_map"]["encoder.embed_tokens.weight"] = "pytorch_model-00001-of-00002.bin"
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert huggingface.convert.main([str(tmp_path), str(tmp_path / "new")]) == 0
    said = "left out, as no file has what the index names: encoder.embed_tokens.weight"
    assert said in capsys.readouterr().err
    assert ours(tmp_path / "new").keys() == expected.keys()


@pytest.mark.parametrize("file", ["consolidated.safetensors", "model.Q4_K_M.gguf", "tf_model.h5"])
def test_weights_in_other_forms_are_named(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"x")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=f"neither model.safetensors nor .*there is {file}, which"):
        read_hf_directory(tmp_path)


# ---- the hub -------------------------------------------------------------------------------------
TEXTS = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
BINS = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
REPOSITORIES = {
    # files besides TEXTS, and those of them that are needed
    "one file": (["model.safetensors", "pytorch_model.bin", "tf_model.h5"], {"model.safetensors"}),
    "Llama 2": (
        [*SHARDS, "model.safetensors.index.json", *BINS, "pytorch_model.bin.index.json"],
        {*SHARDS, "model.safetensors.index.json", "pytorch_model.bin.index.json"},
    ),
    "Mistral v0.3": (
        [*SHARDS, "model.safetensors.index.json", "consolidated.safetensors", "params.json"],
        {*SHARDS, "model.safetensors.index.json", "params.json"},
    ),
    "gpt-oss": (
        [*SHARDS, "model.safetensors.index.json", "original/model.safetensors",
         "original/config.json", "metal/model.bin"],
        {*SHARDS, "model.safetensors.index.json"},
    ),
    "GPT-J": (["pytorch_model.bin", "tf_model.h5", "flax_model.msgpack"], {"pytorch_model.bin"}),
    "Pygmalion": (
        [*BINS, "pytorch_model.bin.index.json"], {*BINS, "pytorch_model.bin.index.json"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPOSITORIES)
def test_only_the_weights_that_are_read_are_downloaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, needed = REPOSITORIES[name]
    fetched = tmp_path / "fetched"
    indices = {"model.safetensors.index.json": SHARDS, "pytorch_model.bin.index.json": BINS}

    def download(
        repo: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_: Any
    ) -> str:
        for file in filter_repo_objects(
            [*TEXTS, *files], allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            (fetched / file).parent.mkdir(parents=True, exist_ok=True)
            placed = {f"weight {i}": each for i, each in enumerate(indices.get(file, []))}
            (fetched / file).write_text(json.dumps({"weight_map": placed}))
        return str(fetched)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("huggingface.pretrained.is_reachable", lambda: True)
    get_local_folder("owner/model", ["config.json"])
    assert {path.name for path in fetched.iterdir()} == {"config.json"}
    assert get_local_folder("owner/model") == fetched
    found = {str(path.relative_to(fetched)) for path in fetched.rglob("*") if path.is_file()}
    assert found == {*TEXTS} | needed


def test_a_tokenizer_beside_a_pointer_of_the_weights_is_read(tmp_path: Path) -> None:
    """A clone without git-lfs has the small files."""
    shutil.copytree(SAMPLE_FOLDER / "t5_tokenizer", tmp_path / "clone")
    (tmp_path / "clone" / "model.safetensors").write_text(POINTER)
    assert load_tokenizer(str(tmp_path / "clone"))("a")["input_ids"]
