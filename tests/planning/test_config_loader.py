"""Models by name: folders as transformers writes them, of sizes that no preset has."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import huggingface.convert
import run_export
import run_finetuning
import run_generation
import run_validation
from checkpoints import CheckpointStore, load_checkpoint, manifest
from config.families import family_by_model_type
from config.presets import load_config
from config.t5 import T5Config
from config.unsupported_models import UNSUPPORTED
from files.json_files import read_json_object
from files.yaml_files import dump_yaml
from huggingface.model_folders import read_hf_directory
from huggingface.multimodal import TEXT_MODEL_TYPES
from modelling.model_family import get_family
from modelling.t5.config_json import from_config_json
from planning.config_loader import CONFIG_LOADER
from run.hf_export import export_model
from run.resume import resolve_initial_state
from terminal.command_line import read_command_line
from tests.data.corpora import sample_tokenizer
from tests.huggingface.hub_folders import GPTJ, KINDS, T5, save, save_bin
from tests.modelling.weight_maps import base_weight_map
from tests.slow import slow

SAMPLE = ["--data.dataset", "sample", "--device", "cpu"]


PRESETS = {"t5": "tiny", "2019": "tiny", "mt5": "tiny", "gptj": "gptj_tiny", "qwen3": "qwen3_tiny"}


@pytest.mark.parametrize("kind", ["gptj", *(slow(k) for k in ("t5", "2019", "mt5", "qwen3"))])
def test_a_folder_of_transformers_trains_and_comes_back(kind, tmp_path, capsys):
    """At rate 0 the exported weights are those that went in, bit for bit."""
    model = save(kind, tmp_path / "hub")
    assert len(list((tmp_path / "hub").glob("*.safetensors"))) > 1
    how = ["--config", PRESETS[kind], *SAMPLE]
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
    for name in KINDS[kind][1]:
        if name not in ("bos_token_id", "eos_token_id", "tie_word_embeddings"):
            assert last[name] == first[name], name
    # Everything that loads the run has its sizes from there.
    again = ["--load", str(tmp_path / "run"), "--save-hf", str(tmp_path / "again")]
    assert run_export.main(again) == 0
    assert load_checkpoint(tmp_path / "run").step == 1


@pytest.mark.parametrize(
    ("kind", "tied"), [("t5", False), ("2019", True), ("v1.1, tied", True), ("mt5, tied", True)]
)
def test_files_say_whether_the_head_is_the_embedding(kind, tied, tmp_path):
    """transformers 5 ties the head of each T5 it makes, and writes the same config.json as of one
    whose head is its own."""
    save(kind, tmp_path)
    found = CONFIG_LOADER.from_model(str(tmp_path))
    assert found["model"]["embedding"]["tied"] is tied
    assert found["model"]["scale_decoder_outputs"] is (kind == "2019")
    config = read_command_line(
        "", "finetuning", "tiny", ["--model", str(tmp_path)], None, CONFIG_LOADER
    )
    start = resolve_initial_state(config.config, base_weight_map(config.config))
    assert ("lm_head.weight" in start.tensors) is not tied


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["2019", "mt5", "qwen3"])
@pytest.mark.parametrize("where", ["resident", "streamed"])
def test_a_folder_goes_through_all_scripts(kind, where, tmp_path, capsys):
    """The trained run answers what transformers answers with what it exports."""
    save(kind, tmp_path / "hub")
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    flags = ["--steps", "30", "--global_batch_size", "16", "--micro_batch_size", "8"]
    model = ["--config", PRESETS[kind], *SAMPLE, "--model", str(tmp_path / "hub")]
    assert run_finetuning.main([*model, *flags, "--save", run, "--save-hf", out]) == 0
    few = ["--load", run, "--generation.weights", where, "--micro_batch_size", "4"]
    assert run_validation.main([*few, "--eval.samples", "20"]) == 0
    assert "accuracy" in capsys.readouterr().out
    prompts = ["mnli hypothesis: Anna slept. premise: Anna was awake.", "Nina moved the hat."]
    assert run_generation.main([*few, "--no_template", *prompts]) == 0
    answers = capsys.readouterr().out.splitlines()[-2:]
    model = type(save(kind, tmp_path / "again")).from_pretrained(out).eval()
    side = "right" if model.config.is_encoder_decoder else "left"
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, padding_side=side)
    most = 5 if kind == "qwen3" else 8
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            found = model.generate(ids, do_sample=False, max_new_tokens=most)[0]
        written = found if model.config.is_encoder_decoder else found[ids.shape[1] :]
        assert tokenizer.decode(written, skip_special_tokens=True).strip() == answer.strip()


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("t5", {"feed_forward_proj": "gelu"}, "has feed_forward_proj 'gelu', but must have one of"),
        ("t5", {"is_decoder": True}, "has is_decoder True, but must have False"),
        (
            "t5",
            {"model_type": "longt5"},
            "the kind 'longt5', another encoder-decoder, which is not there; there are: t5, mt5, "
            f"{', '.join([*list(family_by_model_type())[2:], 'gemma3, mistral3'])}\n",
        ),
        ("t5", {"model_type": "dbrx"}, "'dbrx', a mixture of experts, which is not"),
        ("t5", {"model_type": "foo"}, "is of the kind 'foo', which is not known; there are: t5"),
        ("t5", {"model_type": ["t5"]}, r"model_type is \['t5'\], but must be text"),
        ("t5", {"model_type": "gemma3"}, "text_config is missing"),
        ("t5", {"d_model": "many"}, "d_model is 'many', but must be an integer"),
        ("t5", {"num_layers": "1"}, "num_layers is '1', but must be an integer"),
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


def test_no_kind_is_there_and_missing():
    listed = [kind for group in UNSUPPORTED.values() for kind in group.split()]
    assert len(set(listed)) == len(listed)
    assert not set(listed) & {*family_by_model_type(), *TEXT_MODEL_TYPES}
    assert set(listed) <= {*transformers.CONFIG_MAPPING}


def test_an_adapter_is_no_model(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert run_finetuning.main(["--model", str(tmp_path), *SAMPLE]) == 2
    assert f"{tmp_path} is an adapter, not a model: give --adapter.load" in capsys.readouterr().err


def test_without_torch_a_folder_of_bin_files_says_how_to_convert_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface.model_folders.has_torch", lambda: False)
    data = {"model_type": "t5", **T5}
    (tmp_path / "config.json").write_text(json.dumps(data))
    torch.save({}, tmp_path / "pytorch_model.bin")
    sample_tokenizer().save_pretrained(tmp_path)
    assert run_finetuning.main(["--model", str(tmp_path), "--config", "tiny"]) == 2
    said = capsys.readouterr().err
    assert f"python3 -m huggingface.convert {tmp_path}" in said


@pytest.mark.parametrize(
    ("kind", "files", "dtype"),
    [
        ("t5", 1, torch.float32),
        ("t5", 3, torch.bfloat16),
        ("gptj", 2, torch.float16),
        ("2019", 1, torch.float32),
    ],
)
def test_a_folder_of_bin_files_is_converted(kind, files, dtype, tmp_path):
    model = save_bin(kind, tmp_path / "old", files, dtype)
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    assert huggingface.convert.main([old, new]) == 0
    again, found = type(model).from_pretrained(new, dtype=dtype, output_loading_info=True)
    assert not found["missing_keys"]
    state = again.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
    assert not any(".bin" in name for name in names)
    if kind == "2019":  # it has the embedding under four names
        found = from_config_json(read_json_object(tmp_path / "new" / "config.json"))
        weights = base_weight_map(T5Config.from_dict({"model": found})).from_hf(
            read_hf_directory(new)
        )
        np.testing.assert_array_equal(
            weights["shared.weight"], model.shared.weight.numpy(force=True)
        )
    if kind == "gptj":  # and ours takes it
        table = read_hf_directory(new)
        assert table["lm_head.weight"].dtype == np.float16


def save_odd_bin(content: object, folder: Path) -> None:
    """The content, or a pipe, or two files without an index or with one that does not fit."""
    path = folder / "pytorch_model.bin"
    if content is None:
        os.mkfifo(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif not isinstance(content, str):
        torch.save(content, path)
    else:
        files = [f"pytorch_model-{number}-of-2.bin" for number in (1, 2)]
        for file in files:
            torch.save({"a": torch.zeros(2)}, folder / file)
        named = {"a": files[0], "b": files[content == "twice"]}
        if content != "of 2":
            index = {"weight_map": named}
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


class Harm:
    def __reduce__(self):
        return print, ("this ran",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"weight": torch.zeros(2), "epoch": 3}, "epoch of .*pytorch_model.bin is no tensor"),
        ([torch.zeros(2)], "holds no tensors by name"),
        ({"weight": Harm()}, "cannot read .*pytorch_model.bin: "),
        ({}, "holds no tensors by name"),
        ({"weight": torch.eye(2).to_sparse()}, "weight of .* is sparse"),
        ({"weight": torch.zeros(2, dtype=torch.complex64)}, "is torch.complex64, which cannot"),
        ({"__metadata__": torch.zeros(2)}, "no tensor can be named __metadata__"),
        ({"a\udc80": torch.zeros(2)}, r"no tensor can be named a\\udc80"),
        (b"no file of torch.save", "pytorch_model.bin: it is damaged, no file of torch.save"),
        (None, "pytorch_model.bin: it is not a regular file"),
        ("of 2", "neither pytorch_model.bin nor pytorch_model.bin.index.json found"),
        ("twice", "pytorch_model-2-of-2.bin has a, as another file has"),
    ],
)
def test_bin_files_with_other_than_tensors_are_refused(content, said, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    save_odd_bin(content, tmp_path)
    assert huggingface.convert.main([str(tmp_path), str(tmp_path / "new")]) == 2
    out, err = capsys.readouterr()
    assert re.search(said, err)
    assert "this ran" not in out
    assert not (tmp_path / "new").exists()


def test_a_bin_file_that_is_missing_is_named(tmp_path, capsys):
    save_bin("gptj", tmp_path / "old", 2)
    (tmp_path / "old" / "pytorch_model-2-of-2.bin").unlink()
    assert huggingface.convert.main([str(tmp_path / "old"), str(tmp_path / "new")]) == 2
    assert "pytorch_model-2-of-2.bin" in capsys.readouterr().err


def test_what_is_no_run_is_said_before_what_the_default_preset_needs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(
        "run.evaluation.evaluate_checkpoint.evaluate_checkpoint", lambda *_: pytest.fail("too late")
    )
    assert run_validation.main(["--load", str(tmp_path)]) == 2
    said = f"there is neither a checkpoint nor a Hugging Face model in {tmp_path}"
    assert said in capsys.readouterr().err
    assert run_validation.main(["--load", str(tmp_path / "typo")]) == 2
    assert f"model {tmp_path / 'typo'}: no such folder here" in capsys.readouterr().err
    assert CONFIG_LOADER.from_load("random") is None


def test_a_run_of_another_format_is_refused_in_one_sentence(tmp_path, capsys):
    """Its config.yml has other names: the message is about the format, not about a field."""
    with CheckpointStore(tmp_path) as store:
        texts = {"config.yml": "family: t5\nevaluation: {steps: 5}\n"}
        store.save(1, {"w": np.zeros(1, np.float32)}, {}, wait=True, texts=texts)
    (path,) = tmp_path.glob("*/manifest.json")
    content = json.loads(path.read_text())["content"] | {"format": manifest.FORMAT - 1}
    path.write_text(json.dumps({"sha256": manifest._sha256_of_json(content), "content": content}))
    for script, flag in ((run_validation, "--load"), (run_finetuning, "--save")):
        assert script.main([flag, str(tmp_path), "--device", "cpu"]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert f"has format {manifest.FORMAT - 1}, older than the {manifest.FORMAT}" in said


# ---- what one run hands on to another -----------------------------------------------------------
ONE_RUN = {
    "checkpoint": {"load_optimizer": False, "save": "runs/a", "keep_best": "loss"},
    "eval": {"steps": 5, "samples": 32, "metrics": "loss", "patience": 2},
}
TASK = {"prompt": "q {a}", "target": "{b}", "class_labels": "yes,no"}


def test_a_run_hands_on_model_and_task_but_not_where_it_started_and_what_it_evaluated(tmp_path):
    config = load_config(T5Config, "finetuning", "tiny", {**ONE_RUN, "data": TASK})
    with CheckpointStore(tmp_path) as store:
        texts = {"config.yml": dump_yaml(config.to_dict())}
        store.save(1, {"w": np.zeros(1, np.float32)}, {}, wait=True, texts=texts)
    flags = ["--load", str(tmp_path)]
    for presets in ("finetuning", "inference"):
        found = read_command_line("", presets, "tiny", flags, loader=CONFIG_LOADER).config
        assert (
            found.checkpoint
            == T5Config.from_dict({"checkpoint": {"load": str(tmp_path)}}).checkpoint
        )
        assert found.eval == T5Config().eval
        assert found.data == config.data
        assert found.model.hidden_size == config.model.hidden_size
        assert found.training == config.training


@pytest.mark.parametrize("preset", ["tiny", "gptj_tiny"])
def test_an_exported_model_keeps_its_template_and_separator(preset, tmp_path):
    separator = {"separator": " so:"} if preset == "gptj_tiny" else {}
    small = {"model": {"layers": 1}, "data": TASK | separator}
    flags = ["--config", preset, *(f"--data.{name}={text}" for name, text in small["data"].items())]
    config = read_command_line("", "finetuning", preset, [*flags, "--layers", "1"]).config
    family = get_family(config)
    weights = dict(family.weight_map(config).init_weights(1))
    export_model(config, weights, tmp_path / "out")
    found = CONFIG_LOADER.from_model(str(tmp_path / "out"))["data"]
    assert {name: found[name] for name in small["data"]} == small["data"]


def test_a_preset_with_more_rows_needs_no_hub(capsys):
    """The tests' hub is offline."""
    flags = ["--config", "qwen3_0_6B", "--model.vocab_size", "152064"]
    found = read_command_line("", "finetuning", "tiny", flags, loader=CONFIG_LOADER).config
    assert (found.model.vocab_size, found.model.new_rows) == (152064, "151936-152063")
    assert "from 151936 to 152064 rows" in capsys.readouterr().err
