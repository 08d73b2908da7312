"""Models by name: folders as transformers writes them, of sizes that no preset has."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
import transformers

import huggingface.export
import run_finetuning
from checkpoints import load_checkpoint
from tests.data.corpora import sample_tokenizer

SAMPLE = ["--data.dataset", "sample", "--device", "cpu"]
T5 = {
    "vocab_size": 320, "d_model": 48, "d_kv": 10, "d_ff": 40, "num_layers": 1, "num_heads": 6,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 16, "relative_attention_max_distance": 40,
    "layer_norm_epsilon": 1e-5,
}  # fmt: skip
GPTJ = {
    "vocab_size": 580, "n_positions": 64, "n_embd": 48, "n_layer": 1, "n_head": 3, "rotary_dim": 6,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def save(kind: str, folder, shards: str = "30KB"):
    """A model with random weights and its tokenizer, in several files."""
    torch.manual_seed(1)
    if kind == "t5":
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))
        # This class ties the head to the embedding, whatever the configuration says.
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    else:
        model = transformers.GPTJForCausalLM(transformers.GPTJConfig(**GPTJ))
    model.save_pretrained(folder, max_shard_size=shards)
    sample_tokenizer(kind).save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["t5", "gptj"])
def test_a_folder_of_transformers_trains_and_comes_back(kind, tmp_path, capsys):
    """At rate 0 the exported weights are those that went in, bit for bit."""
    model = save(kind, tmp_path / "hub")
    assert len(list((tmp_path / "hub").glob("*.safetensors"))) > 1
    how = ["--config", {"t5": "tiny", "gptj": "gptj_tiny"}[kind], *SAMPLE]
    flags = ["--steps", "1", "--global_batch_size", "8", "--micro_batch_size", "4"]
    out = ["--save", str(tmp_path / "run"), "--save-hf", str(tmp_path / "out")]
    assert run_finetuning.main([*how, "--model", str(tmp_path / "hub"), *flags, *out]) == 0
    assert f"starting from {tmp_path / 'hub'}" in capsys.readouterr().err
    written = type(model).from_pretrained(tmp_path / "out").state_dict()
    for name, value in model.state_dict().items():
        if not name.endswith("embed_tokens.weight"):
            np.testing.assert_array_equal(written[name].numpy(), value.numpy(), err_msg=name)
    first = json.loads((tmp_path / "hub" / "config.json").read_text())
    last = json.loads((tmp_path / "out" / "config.json").read_text())
    for name in T5 if kind == "t5" else GPTJ:
        if name not in ("n_positions", "bos_token_id", "eos_token_id", "tie_word_embeddings"):
            assert last[name] == first[name], name
    # Everything that loads the run has its sizes from there.
    again = ["--load", str(tmp_path / "run"), "--save-hf", str(tmp_path / "again")]
    assert huggingface.export.main(again) == 0
    assert load_checkpoint(tmp_path / "run").step == 1


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("t5", {"feed_forward_proj": "relu"}, "has feed_forward_proj 'relu', but must have gated"),
        ("t5", {"num_decoder_layers": 2}, "has num_decoder_layers 2, but must have 1"),
        ("t5", {"model_type": "bart"}, "is of the kind 'bart', but there are: t5, gptj"),
        ("t5", {"d_model": "many"}, "d_model is 'many', but must be an integer"),
        ("gptj", {"activation_function": "relu"}, "has activation_function 'relu'"),
        ("gptj", {"n_inner": 7}, "has n_inner 7, but must have 192"),
        ("gptj", {"rotary_dim": None}, "rotary_dim is None, but must be an integer"),
    ],
)
def test_models_of_another_kind_are_refused(kind, change, said, tmp_path, capsys):
    data = {"model_type": kind, **(T5 if kind == "t5" else GPTJ)} | change
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert run_finetuning.main(["--model", str(tmp_path), *SAMPLE]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_folder_of_bin_files_says_how_to_convert_it(tmp_path, capsys):
    data = {"model_type": "t5", **T5}
    (tmp_path / "config.json").write_text(json.dumps(data))
    torch.save({}, tmp_path / "pytorch_model.bin")
    sample_tokenizer().save_pretrained(tmp_path)
    assert run_finetuning.main(["--model", str(tmp_path), "--config", "tiny"]) == 2
    said = capsys.readouterr().err
    assert f"python3 -m huggingface.convert {tmp_path}" in said
