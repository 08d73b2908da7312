"""What the program chooses without a preset: by the model, the data and the machine."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

import planning.auto_config as choices
import run_export
import run_finetuning
import run_generation
import run_validation
from checkpoints import CheckpointStore
from config.errors import ConfigError
from config.gptj import GPTJConfig
from config.llama import LlamaConfig
from config.presets import load_config
from config.sections import RunConfig
from config.t5 import T5Config
from data.pipeline import Pipeline
from files.yaml_files import dump_yaml, read_yaml
from modelling.model_family import get_family
from planning.auto_config import with_generation_lengths
from planning.config_loader import CONFIG_LOADER
from planning.hardware.machines import machines
from terminal.command_line import read_command_line
from tests.huggingface.hub_folders import save
from tests.slow import slow

ROWS = 300


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with models of Hugging Face, and data for them."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("t5", "gptj"):
        save(kind, folder / kind)
    write_rows(folder / "rows.jsonl", ROWS, "the lamp")
    return folder


def write_rows(path: Path, count: int, answer: str, words: int = 1) -> None:
    rows = ({"prompt": f"Anna took {'it ' * words}{i}", "completion": answer} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def chosen(models, capsys, monkeypatch) -> Callable[..., RunConfig]:
    """The configuration that a command line of training ends up with."""
    monkeypatch.chdir(models)

    def choose(*flags: str, **how: Any) -> RunConfig:
        line = read_command_line("", "finetuning", "tiny", flags, loader=CONFIG_LOADER)
        return choices.resolve_auto_fields(line, ("train",), **{"trains": True, **how}).config

    return choose


DATA = ("--data.train", "rows.jsonl")


def machine(monkeypatch, devices: int, memory: float = 80e9, bits: bool = True) -> None:
    """Pretend to be on a machine with so many GPUs."""
    found = choices.AvailableDevices("gpu", bits, devices, memory)
    monkeypatch.setattr(choices.AvailableDevices, "from_local_machine", lambda _: found)


# ---- what follows from what ---------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["t5", "gptj"])
def test_lengths_are_those_of_the_longest_texts(kind, chosen, models, tmp_path):
    output = {"t5": "decoder_sequence_length", "gptj": "output_length"}[kind]
    short = chosen("--model", kind, *DATA).model
    write_rows(tmp_path / "long.jsonl", 3, "the red lamp " * 9, words=70)
    rows = f"rows.jsonl,{tmp_path}/long.jsonl"
    long = chosen("--model", kind, "--data.train", rows).model
    for name in ("sequence_length", output):
        assert getattr(short, name) < getattr(long, name)
        assert getattr(short, name) % 8 == 0
    validation = chosen("--model", kind, *DATA, "--data.validation", f"{tmp_path}/long.jsonl").model
    assert getattr(validation, output) == getattr(long, output)
    given = chosen("--model", kind, *DATA, f"--{output}", "12", "--sequence_length", "33").model
    assert (given.sequence_length, getattr(given, output)) == (33, 12)


@pytest.mark.parametrize("kind", ["t5", "gptj"])
def test_preferences_go_slowly_and_both_texts_have_room(kind, chosen, models, tmp_path):
    rows = [{"prompt": f"Anna took {i}", "chosen": "the lamp " * 9, "rejected": "a lamp " * 5}
            for i in range(40)]  # fmt: skip
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = ("--data.train", str(path), "--training.objective", "dpo")
    config = chosen("--model", kind, *pairs)
    alone = chosen("--model", kind, "--data.train", str(path), "--data.prompt", "{prompt}",
                   "--data.target", "{chosen}")  # fmt: skip
    rates = [c.training.optimizer.learning_rate.maximum for c in (config, alone)]
    assert rates[0] == pytest.approx(0.05 * rates[1])
    lengths = config.model.sequence_length, alone.model.sequence_length
    assert lengths[0] > lengths[1] if kind == "gptj" else lengths[0] == lengths[1]
    Pipeline(config, get_family(config).sample_format).make_training_samples()


@pytest.mark.parametrize("name", ["notes.txt", "notes.jsonl"])
def test_plain_text_is_learned_whole(name, chosen, tmp_path, capsys):
    """The loss is on all of it, and the line says so."""
    lines = ["Anna took the lamp." for _ in range(60)]
    texts = [json.dumps({"text": line}) for line in lines] if name.endswith("l") else lines
    (tmp_path / name).write_text("\n".join(texts) + "\n")
    config = chosen("--model", "gptj", "--data.train", str(tmp_path / name))
    assert config.data.loss_on == "all"
    assert "loss on all" in capsys.readouterr().err
    assert chosen("--model", "gptj", *DATA).data.loss_on == "completion"
    assert "loss on completion" in capsys.readouterr().err


def test_long_texts_do_not_take_all_memory(chosen, tmp_path, monkeypatch):
    write_rows(tmp_path / "long.jsonl", 40, "lamp", words=5000)
    config = chosen("--model", "t5", "--data.train", str(tmp_path / "long.jsonl"))
    assert config.model.sequence_length == choices.MAX_SAMPLE_TOKENS


@pytest.mark.parametrize(("rows", "batch"), [(30, 8), (400, 16), (3000, 32)])
def test_the_batch_leaves_an_epoch_enough_steps(rows, batch, chosen, tmp_path):
    write_rows(tmp_path / "rows.jsonl", rows, "lamp")
    config = chosen("--model", "t5", "--data.train", str(tmp_path / "rows.jsonl"))
    assert config.training.global_batch_size == batch
    assert config.training.epochs == 3


def test_devices_share_the_batch(chosen, monkeypatch):
    machine(monkeypatch, devices=8)
    e, t = (c := chosen("--model", "t5", *DATA)).execution, c.training
    assert (e.data_parallel, t.global_batch_size % 8, c.model.precision) == (8, 0, "bfloat16")
    assert chosen("--model", "t5", *DATA, "--tensor_parallel", "2").execution.data_parallel == 4
    odd = chosen("--model", "t5", *DATA, "--global_batch_size", "12")
    assert (odd.execution.data_parallel, odd.execution.tensor_parallel) == (4, 2)
    assert odd.training.global_batch_size == 12
    assert chosen("--model", "t5", *DATA, "--tensor_parallel", "1").num_replicas == 8
    few = chosen("--model", "t5", *DATA, "--data_parallel", "3", "--micro_batch_size", "5")
    assert few.training.global_batch_size % 15 == 0
    machine(monkeypatch, devices=1, bits=False)
    assert chosen("--model", "t5", *DATA).model.precision == "float32"


def test_bfloat16_is_chosen_where_it_has_the_full_rate():
    """A T4 computes it in float32."""
    found = {
        name: choices.AvailableDevices.from_machine(machines()[name]).bfloat16
        for name in ("t4", "a100")
    }
    assert found == {"t4": False, "a100": True}


def test_a_small_device_gets_a_small_micro_batch(chosen, monkeypatch):
    machine(monkeypatch, devices=1)
    large = chosen("--model", "gptj", *DATA, "--global_batch_size", "32")
    machine(monkeypatch, devices=1, memory=5 * 10**6)
    small = chosen("--model", "gptj", *DATA, "--global_batch_size", "32")
    assert large.execution.micro_batch_size == 32
    assert small.execution.micro_batch_size == 8
    assert small.gradient_accumulation * small.execution.micro_batch_size == 32


def test_the_micro_batch_is_the_one_that_is_fastest_in_simulated_runs(chosen, capsys, monkeypatch):
    """On a machine with few operations a byte of its memory, weights are read as seldom as can be;
    sizes that do not fit do not count, nor does what is hardly faster."""
    on = machines()["rtx4090"]
    flags = ("--model", "gptj", *DATA, "--global_batch_size", "32")
    slow = replace(on, bandwidth=1e7, devices=1)
    small = replace(choices.AvailableDevices.from_machine(slow), memory=5 * 10**6)
    monkeypatch.setattr(choices.AvailableDevices, "from_machine", lambda _: small)
    config = chosen(*flags, machine=slow)
    (line,) = capsys.readouterr().err.splitlines()
    rates = {int(n): float(rate) for rate, n in re.findall(r"([\d.]+) with (\d+)", line)}
    assert rates.keys() == {8, 16, 32}
    assert config.execution.micro_batch_size == max(rates, key=rates.__getitem__) == 32
    given = chosen(*flags, "--micro_batch_size", "4", machine=slow)
    assert given.execution.micro_batch_size == 4
    assert "simulated" not in capsys.readouterr().err
    seconds = {4: 0.9, 8: 0.985, 16: math.inf}
    found = lambda config, *_: seconds[config.execution.micro_batch_size]  # noqa: E731
    monkeypatch.setattr(choices, "_simulated_seconds", found)
    assert chosen(*flags, machine=slow).execution.micro_batch_size == 4
    seconds[4] = 0.98
    assert chosen(*flags, machine=slow).execution.micro_batch_size == 8


def test_what_flags_give_stays(chosen):
    flags = ("--learning_rate", "0.5", "--warmup_steps", "3", "--precision", "bfloat16", "--steps",
             "9", "--micro_batch_size", "3", "--data.loss_on", "all")  # fmt: skip
    config = chosen("--model", "gptj", *DATA, *flags)
    rate = config.training.optimizer.learning_rate
    assert (rate.maximum, rate.warmup_steps, rate.warmup_proportion) == (0.5, 3, None)
    assert (config.training.steps, config.training.epochs) == (9, None)
    assert config.execution.micro_batch_size == 3
    assert config.training.global_batch_size % 3 == 0
    assert (config.model.precision, config.data.loss_on) == ("bfloat16", "all")


def test_presets_leave_nothing_open(chosen, capsys):
    assert chosen("--config", "tiny", "--model", "t5", *DATA).training.global_batch_size == 64
    assert "chosen" not in capsys.readouterr().err


# ---- what is said -------------------------------------------------------------------------------
def test_one_line_says_what_was_chosen(chosen, capsys):
    config = chosen("--model", "t5", *DATA)
    (line,) = capsys.readouterr().err.splitlines()
    e, m, t = config.execution, config.model, config.training
    assert line == (
        f"chosen: float32, sequence_length {m.sequence_length}, decoder_sequence_length "
        f"{m.decoder_sequence_length}, batch {t.global_batch_size} = {e.micro_batch_size} micro × "
        "1 accumulation × 1 dp, learning rate 0.0003, warm-up of 0.1 of the steps, 3 epochs (flags "
        "change it)"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "nothing says which model: give --model"),
        (["--load", "random"], "nothing says which model: give --model"),
        (["--model", "t5"], "nothing says which data to take: give --data.train FILE"),
        (["--data.train", "rows.jsonl"], "google/flan-t5-small: no such folder here"),
        (["--model", "t5", "--device", "tpu", *DATA], "tpu device"),
    ],
)
def test_what_is_missing_is_one_sentence(flags, said, models, monkeypatch, capsys):
    monkeypatch.chdir(models)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run_finetuning.main(flags) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert said in last
    assert len(last) < 300


@pytest.mark.parametrize("main", [run_validation.main, run_generation.main, run_export.main])
def test_every_script_says_which_model_it_needs(main, capsys):
    assert main([]) == 2
    assert "nothing says which model" in capsys.readouterr().err


def test_a_plan_is_for_the_machine_that_it_names(chosen):
    batch = ("--global_batch_size", "8")
    config = chosen("--model", "gptj", *batch, only_plans=True, machine=machines()["h200"])
    assert (config.model.precision, config.execution.data_parallel) == ("bfloat16", 8)


def test_a_plan_needs_no_data(models, chosen):
    config = chosen("--model", "gptj", only_plans=True)
    longest = min(choices.MAX_SAMPLE_TOKENS, config.model.max_position_embeddings)
    assert config.model.sequence_length + config.model.output_length == longest
    with pytest.raises(ConfigError, match="nothing says which data"):
        chosen("--model", "gptj")


# ---- from a folder and a JSONL to an exported model ---------------------------------------------
@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("kind", ["gptj", slow("t5")])
def test_three_commands(kind, models, tmp_path, monkeypatch, capsys):
    """Those of docs/own_task.md; the later ones in another folder than the first."""
    here, run, out = (tmp_path / name for name in ("here", "run", "exported"))
    shutil.copytree(models / kind, here / kind)
    shutil.copy(models / "rows.jsonl", here)
    monkeypatch.chdir(here)
    train = ["--model", kind, *DATA, "--data.validation", "0.1", "--save", str(run)]
    assert run_finetuning.main([*train, "--epochs", "0.5"]) == 0
    saved = read_yaml(run / "config.yml")["training"]
    assert saved["epochs"] == 0.5
    # The first command again continues the run, with what was chosen then, from the run alone.
    shutil.rmtree(here / kind)
    assert run_finetuning.main([*train, "--epochs", "0.6"]) == 0
    said = capsys.readouterr().err
    assert "training.epochs: 0.5 -> 0.6\n" in said
    assert "chosen" not in said.partition("training.epochs: ")[2]
    assert f"starting from step {saved['steps']} in" in said
    monkeypatch.chdir(tmp_path)
    some = ["--eval.metrics", "loss"] if kind == "t5" else []
    assert run_validation.main(["--load", str(run), *some]) == 0
    assert "loss" in capsys.readouterr().out
    assert run_export.main(["--load", str(run), "--save-hf", str(out)]) == 0
    transformers.AutoTokenizer.from_pretrained(out)
    assert load_file(out / "model.safetensors")


@pytest.mark.slow  # programs for long texts
@pytest.mark.parametrize("kind", ["t5", "gptj"])
def test_a_folder_of_transformers_answers_and_is_validated(kind, models, monkeypatch, capsys):
    monkeypatch.chdir(models)
    load = ["--load", kind]
    assert run_generation.main([*load, "Anna took", "--generation.max_tokens", "4"]) == 0
    assert run_validation.main([*load, "--data.validation", "rows.jsonl"]) == 0
    assert "exact_match" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "read", "written"),
    [
        ([], 8192 - 256, 256),
        (["--generation.max_tokens", "1000"], 8192 - 1000, 256),
        (["--output_length", "1001"], 8192 - 1008, 1001),
        (["--sequence_length", "64"], 64, 256),
        (["--model.max_position_embeddings", "1048576"], 2**17 - 256, 256),
        (["--model.max_position_embeddings", "128"], 64, 64),
    ],
)
def test_a_model_reads_all_of_its_length_but_what_it_writes(
    flags, read, written, models, monkeypatch
):
    """Its micro-batch is that of shorter prompts."""
    monkeypatch.chdir(models)
    machine(monkeypatch, devices=1)

    def config(*flags: str) -> RunConfig:
        given = ["--model", "gptj", "--model.max_position_embeddings", "8192", *flags]
        line = read_command_line("", "inference", "tiny", given, loader=CONFIG_LOADER)
        return choices.resolve_auto_fields(line).config

    made = config(*flags)
    assert (made.model.sequence_length, made.model.output_length) == (read, written)
    short = config("--model.max_position_embeddings", "2048").execution.micro_batch_size
    assert made.execution.micro_batch_size == short
    line = read_command_line("", "inference", "tiny", ["--model", "gptj"], loader=CONFIG_LOADER)
    planned = choices.resolve_auto_fields(line, ("validation",), only_plans=True).config
    assert planned.model.sequence_length < choices.MAX_SAMPLE_TOKENS


# ---- writing with a run -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("preset", "data", "flags", "read", "written"),
    [
        ("qwen3_tiny:8192", {"train": "x.jsonl"}, [], 8192 - 256, 256),
        ("qwen3_tiny:8192", {"train": "x.jsonl"}, ["--generation.max_tokens", "9"], 8176, 9),
        ("gptj_tiny:131072", {"dataset": "sample"}, [], 131072 - 8, 5),
        ("qwen3_tiny:1048576", {"train": "x.jsonl"}, [], 2**17 - 256, 256),
        ("qwen3_tiny:24", {"train": "x.jsonl"}, [], 8, 12),
        ("qwen3_tiny:16", {"train": "x.jsonl"}, [], 8, 12),
        ("tiny", {"train": "x.jsonl"}, [], 1792, 256),
        ("tiny", {"dataset": "sample"}, [], 2040, 4),
        ("tiny", {"train": "x.jsonl", "examples_per_sample": 4}, [], 1792, 256),
        ("tiny", {"train": "x.jsonl"}, ["--examples_per_sample", "4"], 24, None),
        ("gptj_tiny", {"train": "x.jsonl"}, [], 64, 64),
        ("qwen3_tiny", {"train": "x.jsonl"}, [], 64, 64),
        ("tiny", {"train": "x.jsonl"}, ["--sequence_length", "16"], 16, 256),
        ("tiny", {"train": "x.jsonl"}, ["--generation.max_tokens", "9"], 2032, 9),
    ],
)
def test_lengths_of_the_data_do_not_bind_what_a_run_writes(
    preset, data, flags, read, written, tmp_path
):
    """A run on short texts reads and writes as much as its model can."""
    short = {"model": {"sequence_length": 24}, "data": data}
    kinds = {"tiny": T5Config, "gptj_tiny": GPTJConfig, "qwen3_tiny": LlamaConfig}
    preset, _, length = preset.partition(":")
    if preset != "tiny":
        short["model"]["max_position_embeddings"] = int(length or 128)
    config = load_config(kinds[preset], "finetuning", preset, short)
    with CheckpointStore(tmp_path) as store:
        texts = {"config.yml": dump_yaml(config.to_dict())}
        store.save(1, {"weight": np.zeros(1)}, {}, wait=True, texts=texts)
    given = ["--load", str(tmp_path), "--device", "cpu", *flags]
    line = read_command_line("", "inference", "tiny", given, None, CONFIG_LOADER)
    config = with_generation_lengths(line).config
    assert (config.model.sequence_length, config.generation.max_tokens) == (read, written)
    by_preset = read_command_line(
        "", "inference", "tiny", ["--config", preset], None, CONFIG_LOADER
    )
    assert with_generation_lengths(by_preset) is by_preset
