"""Model folders: what transformers writes we read, what we write transformers loads."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import T5Config, T5ForConditionalGeneration

from checkpoints import CheckpointError
from config.presets import load_config
from config.t5 import T5Config as OurT5Config
from data.tokenizer import Tokenizer, save_tokenizer
from files.run_folder import RunFolder
from huggingface.model_folders import is_hf_directory, read_hf_directory
from huggingface.model_folders import write_hf_directory as write
from run.export_extras import base_generation_config
from tests.data.corpora import sample_tokenizer

DTYPES = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float16: np.dtype(np.float16),
}


def tiny_t5():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )
    model = T5ForConditionalGeneration(config)
    # transformers 5 reads the field above only as "do not scale" and ties the head all the same.
    model.lm_head.weight = torch.nn.Parameter(torch.randn(64, 16))
    return model


def bits_of(tensor):
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def numbers(count=4):
    return {f"w{i}": np.full((2, 5), i, np.float32) for i in range(count)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", ["1GB", "10KB"], ids=["whole", "sharded"])
def test_reading_what_transformers_writes(tmp_path, dtype, size):
    model = tiny_t5().to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (size == "10KB")
    assert is_hf_directory(tmp_path)
    tensors = read_hf_directory(tmp_path)
    theirs = model.state_dict()
    assert "shared.weight" in tensors
    assert "lm_head.weight" in tensors
    assert set(tensors) <= set(theirs)
    tied = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    assert set(theirs) - set(tensors) <= tied
    for name, array in tensors.items():
        assert array.dtype == DTYPES[dtype]
        assert array.shape == tuple(theirs[name].shape)
        assert array.tobytes() == bits_of(theirs[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [10**9, 10_000], ids=["whole", "sharded"])
def test_transformers_loads_what_we_write(tmp_path, dtype, size):
    model = tiny_t5().to(dtype)
    tensors = {
        name: np.frombuffer(bits_of(weight), DTYPES[dtype]).reshape(weight.shape)
        for name, weight in model.state_dict().items()
        if "embed_tokens" not in name
    }
    write(tmp_path / "model", tensors, model.config.to_dict(), shard_bytes=size)
    loaded, report = T5ForConditionalGeneration.from_pretrained(
        tmp_path / "model", dtype=dtype, output_loading_info=True
    )
    assert not any(report.values()), report
    assert not loaded.config.scale_decoder_outputs
    theirs = loaded.state_dict()
    assert set(theirs) == set(model.state_dict())
    for name, weight in model.state_dict().items():
        # transformers widens the second feed-forward weight of float16 models to float32.
        assert bits_of(theirs[name].to(dtype)) == bits_of(weight), name


def test_the_weights_are_split_above_the_size(tmp_path):
    write(tmp_path, numbers(5), {}, shard_bytes=80)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 40
    assert index["weight_map"]["w4"] == "model-00003-of-00003.safetensors"


def test_an_export_says_the_type_of_its_weights_and_keeps_how_the_base_writes(tmp_path):
    """vLLM and `from_pretrained(dtype="auto")` go by the first, `generate` by the second."""
    base = {
        "do_sample": True,
        "top_p": 0.8,
        "eos_token_id": [5, {}, "x", 3],
        "_from_model_config": True,
    }
    half = {"w": np.zeros((4, 4), ml_dtypes.bfloat16), "norm": np.zeros(4, np.float32)}
    write(tmp_path / "model", half, {"eos_token_id": 7, "pad_token_id": 0}, generation=base)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    settings = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert settings == base | {"eos_token_id": [7, 5, 3], "pad_token_id": 0}


def test_a_run_keeps_how_its_base_writes(tmp_path):
    tokenizer, settings = Tokenizer(sample_tokenizer("t5")), {"do_sample": True, "top_k": 5}
    save_tokenizer(tokenizer, RunFolder(tmp_path), settings)
    kept = {"data": {"tokenizer": str(tmp_path / "tokenizer")}}
    over = {"checkpoint": {"load": str(tmp_path)}} | kept
    assert base_generation_config(load_config(OurT5Config, "inference", "tiny", over)) == settings


def test_an_empty_folder_is_filled_and_another_is_left_alone(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / f".{'0' * 16}.draft").mkdir()  # of a process that was killed
    write(folder, numbers(3), {"eos_token_id": 1, "x": 2}, add_files=lambda d: (d / "more").touch())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "more",
    ]
    described = {"eos_token_id": 1, "x": 2, "dtype": "float32"}
    assert json.loads((folder / "config.json").read_text()) == described
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": 1}
    with pytest.raises(CheckpointError, match=r"model is there and is not empty: give a new"):
        write(folder, numbers(1), {})
    assert len(read_hf_directory(folder)) == 3


def test_a_dtype_that_numpy_lacks(tmp_path):
    from safetensors.torch import save_file as save_torch

    save_torch({"w": torch.zeros(2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    tensors = read_hf_directory(tmp_path)
    with pytest.raises(CheckpointError, match="tensor w of .* is F8_E4M3, which is not supported"):
        tensors.spec("w")
    with pytest.raises(CheckpointError, match="tensor w"):
        tensors["w"]


def write_bin(path):
    (path / "pytorch_model.bin").touch()


def write_safetensors(path):
    save_file({"a": np.zeros(1)}, path / "model-00001-of-00002.safetensors")


def write_index(path):
    files = {"a": "model-00001-of-00002.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: path.rmdir(), "no model in .*: give a Hugging Face model folder"),
        (lambda path: None, "neither model.safetensors nor .*index.json found in"),
        (write_bin, "cannot read .*pytorch_model.bin: it is damaged"),
        (write_safetensors, "neither model.safetensors nor .*index.json found in"),
        (write_index, "model-00001-of-00002.safetensors is missing"),
        (lambda path: (path / "model.safetensors.index.json").write_text("{"), "is damaged"),
        (lambda path: (path / "model.safetensors.index.json").write_text("[]"), "is damaged"),
        (lambda path: (path / "model.safetensors").write_bytes(b"x" * 99), "is damaged"),
    ],
)
def test_folders_that_cannot_be_read(tmp_path, prepare, message):
    path = tmp_path / "model"
    path.mkdir()
    prepare(path)
    with pytest.raises(CheckpointError, match=message) as error:
        read_hf_directory(path)
    assert "\n" not in str(error.value)


def test_an_index_does_not_lead_out_of_the_folder(tmp_path):
    save_file({"a": np.zeros(1)}, tmp_path / "secret.safetensors")
    (tmp_path / "model").mkdir()
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="names files of other folders"):
        read_hf_directory(tmp_path / "model")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file is there and is not empty"):
        write(tmp_path / "file", numbers(), {})
    with pytest.raises(CheckpointError, match=r"cannot write the model folder .* is not a folder"):
        write(tmp_path / "file" / "model", numbers(), {})


def test_what_is_a_model_folder(tmp_path):
    assert not is_hf_directory(tmp_path)
    assert not is_hf_directory(tmp_path / "absent")
    write_bin(tmp_path)
    assert is_hf_directory(tmp_path)
