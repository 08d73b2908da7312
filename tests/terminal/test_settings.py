"""The one rule for settings: defaults, what the program chooses, a preset or a file, flags.

Of a run that is continued: its config.yml, flags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planning.auto_config
import run_finetuning
import run_generation
import run_validation
from checkpoints import CheckpointStore
from config.base import config_fields, flatten_by_path, nest_by_path
from config.errors import ConfigError
from config.families import config_class_of_preset
from config.flags import ALIASES, shortest_flag
from config.presets import load_config, load_preset, merge_over, preset_names
from config.sections import RunConfig
from files.formatting import format_name
from files.yaml_files import dump_yaml
from planning.config_loader import CONFIG_LOADER
from run.options import RunOptions
from terminal.command_line import CommandLine, read_command_line
from terminal.parser import add_export_option
from terminal.preparse import AddOptions, script_options
from tests.huggingface.hub_folders import save
from tests.slow import slow

RATE = "training.optimizer.learning_rate"
ALL = {
    "model.seed": 7,
    "training.steps": 60,
    "training.global_batch_size": 24,
    "training.optimizer.weight_decay": 0.1,
    "training.optimizer.beta2": 0.5,
    f"{RATE}.function": "cosine",
    f"{RATE}.maximum": 3e-3,
    f"{RATE}.warmup_proportion": 0.25,
    "execution.micro_batch_size": 8,
    "execution.activations": "keep",
    "eval.steps": 5,
    "checkpoint.minutes": 3.0,
    "checkpoint.keep_best": "loss",
    "data.on_null": "skip",
}
"""What no preset nor default says."""


def read(*flags: str) -> CommandLine:
    return read_command_line("", "finetuning", "tiny", flags, RunOptions.add_flags, CONFIG_LOADER)


def values(config: RunConfig) -> dict[str, Any]:
    return flatten_by_path(config.to_dict())


@pytest.fixture
def run(tmp_path) -> Callable[..., tuple[str, dict[str, Any]]]:
    """Makes the folder of a run with a saved step; gives it, and its settings by dotted names."""

    def make(preset: str = "tiny", **more: Any) -> tuple[str, dict[str, Any]]:
        data = merge_over(load_preset("finetuning", preset), nest_by_path({**ALL, **more}))
        config = config_class_of_preset(data, preset).from_dict(data)
        with CheckpointStore(tmp_path / "run") as store:
            texts = {"config.yml": dump_yaml(config.to_dict())}
            store.save(9, {"w": np.zeros(1, np.float32)}, {}, wait=True, texts=texts)
        return str(tmp_path / "run"), values(config)

    return make


def changed(config: RunConfig, before: Mapping[str, Any]) -> dict[str, Any]:
    now = values(config)
    return {name: now[name] for name in before if now[name] != before[name]}


# ---- a run that is continued --------------------------------------------------------------------
@pytest.mark.parametrize("how", [[], ["--config", "tiny"]], ids=["alone", "preset"])
def test_a_run_goes_on_with_all_of_its_settings(how, run):
    folder, before = run()
    line = read(*how, "--save", folder)
    assert changed(line.config, before) == {"checkpoint.save": folder}
    assert planning.auto_config.resolve_auto_fields(line, ("train",), trains=True) is line


def test_flags_change_them_and_each_change_is_a_line(run, capsys):
    folder, before = run()
    flags = ("--steps", "80", "--training.optimizer.beta2", "0.5", "--learning_rate", "1e-3")
    config = read("--config", "tiny", "--save", folder, *flags).config
    new = {"checkpoint.save": folder, "training.steps": 80, f"{RATE}.maximum": 1e-3}
    assert changed(config, before) == new
    said = capsys.readouterr().err.splitlines()
    assert "training.steps: 60 -> 80" in said
    assert f"{RATE}.maximum: 0.003 -> 0.001" in said
    assert not any("beta2:" in line and "->" in line for line in said)


def test_places_that_only_the_run_names_are_said(run, capsys, tmp_path):
    """Whoever made its folder chose where it reads and copies what the run has."""
    inside, outside = str(tmp_path / "run" / "packed"), str(tmp_path / "runs.jsonl")
    places = {"checkpoint.save": "run", "checkpoint.mirror": "s3://bucket/run"}
    places |= {"data.train": outside, "execution.quantized_cache": inside, "data.prompt": "a {b}"}
    folder, _ = run(**places, **{"data.target": "{b}", "model.quantization": None})
    line = f"as the run in {folder} says: checkpoint.mirror s3://bucket/run, data.train {outside}"
    read("--save", folder)
    assert line in capsys.readouterr().err.splitlines()
    read("--save", folder, "--data.train", outside)
    said = capsys.readouterr().err.splitlines()
    assert f"as the run in {folder} says: checkpoint.mirror s3://bucket/run" in said
    other = ("--load", folder, "--save", str(tmp_path / "other"))
    read(*other)
    assert f"as the run in {folder} says: data.train {outside}" in capsys.readouterr().err
    read(*other, "--data.train", outside)
    assert " says: " not in capsys.readouterr().err


def test_what_config_says_in_vain_is_a_line(run, capsys, tmp_path):
    folder, before = run()
    own = tmp_path / "own.yml"
    own.write_text("family: t5\nsteps: 90\ntraining: {optimizer: {beta2: '0.5'}}\nlayers: 2\n")
    assert changed(read("--config", str(own), "--save", folder).config, before).keys() == {
        "checkpoint.save"
    }
    (said,) = capsys.readouterr().err.splitlines()
    assert said == f"training.steps: 60 of the run in {folder}, not 90 of {own}"


def test_a_run_elsewhere_gives_its_settings_too(run, tmp_path):
    """But not where it started and what it evaluated; the file lies over them."""
    folder, before = run()
    (tmp_path / "own.yml").write_text(f"load: {folder}\nsteps: 90\n")
    for flags in (["--load", folder, "--steps", "90"], ["--config", str(tmp_path / "own.yml")]):
        config = read(*flags).config
        kept = {n: v for n, v in before.items() if not n.startswith(("checkpoint.", "eval."))}
        assert changed(config, kept) == {"training.steps": 90}
        assert config.eval.steps is None
        assert config.checkpoint.load == folder


def test_fresh_and_new_runs_do_not(run):
    folder, _ = run()
    tiny = load_config(config_class_of_preset({"family": "t5"}, ""), "finetuning", "tiny")
    for flags in (
        ["--save", folder, "--overwrite"],
        ["--load", folder, "--checkpoint.load_optimizer", "false"],
    ):
        assert read("--config", "tiny", *flags).config.training == tiny.training


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--config", "gptj_tiny"], "has a run of the family t5, but gptj_tiny is of gptj"),
        (["--beta_ray", "3"], "unknown option --beta_ray"),
    ],
)
def test_another_model_is_not_that_run(flags, said, run):
    folder, _ = run()
    with pytest.raises(ConfigError, match=said):
        read(*flags, "--save", folder)


def test_a_model_that_the_run_began_with_need_not_be_there(run, tmp_path):
    save("t5", tmp_path / "other")
    folder, before = run(**{"checkpoint.load": "gone/model"})
    assert changed(read("--model", "gone/model", "--save", folder).config, before) == {
        "checkpoint.save": folder
    }
    other = read("--model", str(tmp_path / "other"), "--save", folder).config
    assert other.model.hidden_size != before["model.hidden_size"]  # so run.resume refuses it


# ---- one thing that is said in two ways ---------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "value", "other"),
    [("warmup_steps", 3, "warmup_proportion"), ("warmup_proportion", 0.5, "warmup_steps")],
)
def test_a_warm_up_replaces_the_other_one_of_a_run(name, value, other, run):
    own = {f"{RATE}.{other}": 0, f"{RATE}.{name}": None}
    folder, _ = run(**own)
    rate = read("--save", folder, f"--{name}", str(value)).config.training.optimizer.learning_rate
    assert (getattr(rate, name), getattr(rate, other)) == (value, None)


@pytest.mark.parametrize("where", ["run", "preset", "file"])
def test_the_micro_batch_follows_a_batch(where, run, tmp_path, capsys):
    base = {"run": lambda: ["--save", run()[0]], "preset": lambda: ["--config", "tiny"]}
    (tmp_path / "own.yml").write_text("family: t5\nmicro_batch_size: 8\n")
    flags = base.get(where, lambda: ["--config", str(tmp_path / "own.yml")])()
    config = read(*flags, "--global_batch_size", "12").config
    micro = {"run": 6, "preset": 12, "file": 6}[where]
    assert config.execution.micro_batch_size == micro
    assert f"-> {micro}, which divides the batch of 12" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="12 must be divisible by execution.micro_batch_size 5"):
        read(*flags, "--global_batch_size", "12", "--micro_batch_size", "5")


def test_steps_and_epochs_together_are_said(tmp_path, capsys):
    (tmp_path / "own.yml").write_text("family: t5\nsteps: 9\nepochs: 2\n")
    for flags, name in (
        (["--config", str(tmp_path / "own.yml")], str(tmp_path / "own.yml")),
        (["--config", "tiny", "--steps", "9", "--epochs", "2"], "flags"),
    ):
        training = read(*flags).config.training
        assert (training.steps, training.epochs) == (9, None)
        said = capsys.readouterr().err
        assert said == f"{name}: training.steps 9 decides, not epochs 2{'.0' * (name == 'flags')}\n"


# ---- flags that exclude what lies under them ----------------------------------------------------
ON_GPUS = ["xl_gpu", "gptj_6B_gpu_fp8", "llama3_1_8B", "gpt_oss_20b"]
STATE, ROUNDING = "training.optimizer.state", "training.stochastic_rounding"
EXCLUDING = [
    # below, flags, what gives way: name and value
    ({"precision": "bfloat16", ROUNDING: True}, [f"--{STATE}", "8bit_residual8"], (ROUNDING, None)),
    ({"precision": "bfloat16", ROUNDING: True}, ["--master_weights"], (ROUNDING, None)),
    ({"precision": "bfloat16", STATE: "8bit_residual16"}, ["--master_weights"], (STATE, "float32")),
    ({"precision": "bfloat16", "execution.master_weights": True}, [f"--{STATE}", "8bit_residual8"],
     ("execution.master_weights", False)),
    ({"precision": "float16", STATE: "8bit_residual8"}, [f"--{ROUNDING}"], (STATE, "float32")),
    ({STATE: "8bit_residual8", ROUNDING: True}, ["--precision", "bfloat16"], None),
    ({STATE: "bfloat16"}, [f"--{ROUNDING}", "false"], (STATE, "float32")),
    ({ROUNDING: False}, [f"--{STATE}", "bfloat16"], (ROUNDING, None)),
    ({STATE: "bfloat16"}, ["--training.optimizer.name", "adafactor"], (STATE, "float32")),
    ({"training.optimizer.name": "adafactor"}, [f"--{STATE}", "bfloat16"], None),
    ({"fp8.enabled": True}, ["--adapter.rank", "4"], ("fp8.recipe", "current")),
    ({"fp8.enabled": True}, ["--training.frozen", "shared"], ("fp8.recipe", "current")),
    ({"fp8.enabled": True, "fp8.recipe": "current"},
     ["--quantization", "int8", "--adapter.rank", "4"], ("fp8.enabled", False)),
    ({"training.frozen": "shared"}, ["--adapter.rank", "4"], ("training.frozen", None)),
    ({f"{RATE}.minimum": 1e-4, "learning_rate": 1e-3}, ["--learning_rate", "1e-5"],
     (f"{RATE}.minimum", 0.0)),
    ({"training.objective": "dpo", "training.label_smoothing": 0.1},
     ["--training.objective", "ipo"], ("training.label_smoothing", 0.0)),
    ({"execution.update": "deferred", "precision": "bfloat16"}, ["--device_iterations", "2"],
     ("execution.update", "auto")),
]  # fmt: skip


@pytest.mark.parametrize("where", ["file", "run"])
@pytest.mark.parametrize(("below", "flags", "changes"), EXCLUDING)
def test_a_flag_replaces_what_it_excludes(where, below, flags, changes, run, tmp_path, capsys):
    """One that is given beside it is refused, and so is what cannot give way."""
    if where == "file":
        (tmp_path / "own.yml").write_text(dump_yaml({"family": "t5", "steps": 8, **below}))
        lower = ["--config", str(tmp_path / "own.yml")]
    else:
        lower = ["--save", run(**{ALIASES.get(name, name): v for name, v in below.items()})[0]]
    if changes is None:
        with pytest.raises(ConfigError):
            read(*lower, *flags)
        return
    name, value = changes
    assert flatten_by_path(read(*lower, *flags).config.to_dict())[name] == value
    said = capsys.readouterr().err
    assert re.search(rf"^{name}: .* -> {format_name(value)}, which .* excludes$", said, re.M)
    if below.get(name) is not None:
        with pytest.raises(ConfigError):
            read("--config", "tiny", "--steps", "8", *flags_of(below), *flags)


def flags_of(values: Mapping[str, object]) -> list[str]:
    return [piece for name, value in values.items() for piece in (f"--{name}", format_name(value))]


@pytest.mark.parametrize(
    "flags",
    [
        (f"--{STATE}", "8bit_residual8"),
        (f"--{STATE}", "8bit_residual16"),
        ("--master_weights",),
        ("--training.optimizer.name", "adafactor"),
        ("--training.objective", "dpo"),
        ("--adapter.rank", "8"),
        ("--quantization", "int4", "--adapter.rank", "8"),
        ("--training.trainable", "*norm*"),
        ("--learning_rate", "1e-9"),
    ],
)
@pytest.mark.parametrize("presets", [ON_GPUS, slow(preset_names("finetuning"))])
def test_presets_take_a_flag(flags, presets):
    for preset in presets:
        config = read("--config", preset, *flags).config
        assert config.master_weight_slot is None or not config.rounds_stochastically


# ---- a file of one's own ------------------------------------------------------------------------
ROWS = 200


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    save("gptj", tmp_path / "model")
    rows = ({"prompt": f"Anna took {i}", "completion": "the lamp"} for i in range(ROWS))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def completed(*flags: str) -> RunConfig:
    return planning.auto_config.resolve_auto_fields(read(*flags), ("train",), trains=True).config


AS_FLAGS = ("--model", "model", "--data.train", "rows.jsonl")


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("model: model\ndata: {train: rows.jsonl}\n", ()),
        ("load: model\ndata.train: rows.jsonl\nsave: runs/a\n", ("--save", "runs/a")),
        ("data: {train: rows.jsonl, validation: 0.1}\n", ("--data.validation", "0.1")),
        ("model: model\ndata.train: rows.jsonl\nsteps: 5\nlayers: 1\nprecision: bfloat16\n",
         ("--steps", "5", "--layers", "1", "--precision", "bfloat16")),
        ("model: elsewhere\ntraining: {optimizer: {learning_rate: {warmup_steps: 4}}}\n",
         ("--warmup_steps", "4")),
    ],
)  # fmt: skip
def test_a_file_gives_what_it_gives_and_the_rest_is_chosen(text, flags, here):
    (here / "own.yml").write_text(text)
    more = () if "load: " in text else AS_FLAGS
    assert completed("--config", "own.yml", *more) == completed(*AS_FLAGS, *flags)


SCRIPTS: Mapping[str, tuple[str, AddOptions]] = {
    "run_finetuning": ("finetuning", run_finetuning._add_options),
    "run_validation": ("inference", run_validation._add_options),
    "run_generation": ("inference", run_generation._add_options),
    "run_export": ("inference", add_export_option),
}
ALL_OPTIONS = [
    (script, name) for script, (_, add) in SCRIPTS.items() for name in script_options(add)
]


@pytest.mark.parametrize(("script", "name"), ALL_OPTIONS)
def test_a_file_takes_every_option_of_a_script(script, name, tmp_path):
    """In each of the spellings, as the flag does; flags win over the file."""
    presets, add_options = SCRIPTS[script]
    action, flag = script_options(add_options)[name], f"--{name}"
    switch = action.nargs == 0
    value = "original" if action.choices else "7"
    text = "true" if switch else value
    given = [flag] if switch else [flag, value]

    def line(*flags: str) -> CommandLine:
        return read_command_line("", presets, "tiny", flags, add_options, CONFIG_LOADER)

    expected = line("--config", "tiny", *given)
    section, _, last = name.rpartition(".")
    ways = {f"{name}: {text}", f"{name.replace('_', '-')}: {text}"}
    ways |= {f"{section}: {{{last}: {text}}}"} if section else set()
    for way in ways:
        (tmp_path / "own.yml").write_text(f"family: t5\n{way}\n")
        found = line("--config", str(tmp_path / "own.yml"))
        assert (
            vars(found.options).items()
            >= {action.dest: True if switch else getattr(expected.options, action.dest)}.items()
        )
        if not switch and value == "7":
            over = line("--config", str(tmp_path / "own.yml"), flag, "9")
            assert str(getattr(over.options, action.dest)) == "9"
    for nothing in ("null", "false"):
        (tmp_path / "own.yml").write_text(f"family: t5\n{name}: {nothing}\n")
        assert vars(line("--config", str(tmp_path / "own.yml")).options) == vars(
            line("--config", "tiny").options
        ) | {"config": str(tmp_path / "own.yml")}


@pytest.mark.parametrize("family", ["t5", "gptj", "llama"])
def test_a_file_takes_every_field_by_its_flag(family, tmp_path):
    section = config_class_of_preset({"family": family}, "")
    base = flatten_by_path(section.from_dict({}).to_dict())
    names = {leaf.path: {leaf.path, shortest_flag(leaf.path)} for leaf in config_fields(section)}
    for way in (0, -1):
        keys = {sorted(spellings)[way].replace("_", "-" if way else "_"): dotted
                for dotted, spellings in names.items()}  # fmt: skip
        data = {key: base[dotted] for key, dotted in keys.items()} | {"family": family}
        (tmp_path / "own.yml").write_text(dump_yaml(data))
        line = read("--config", str(tmp_path / "own.yml"))
        assert flatten_by_path(line.settings.sources[0].values) == base | {"family": family}


def test_a_file_begins_a_run_anew(run, tmp_path):
    folder, before = run()
    (tmp_path / "own.yml").write_text(f"family: t5\nsave: {folder}\noverwrite: true\n")
    line = read("--config", str(tmp_path / "own.yml"))
    assert line.options.overwrite
    assert line.config.model.seed != before["model.seed"]


def test_lists_and_numbers_are_texts_where_flags_are(tmp_path):
    text = (
        "family: t5\ntraining.trainable: [decoder, shared]\nadapter: {targets: [q, v]}\nsave: 7\n"
    )
    (tmp_path / "own.yml").write_text(text)
    flags = ("--training.trainable", "decoder", "shared", "--adapter.targets", "q", "v")
    config = read("--config", str(tmp_path / "own.yml")).config
    (tmp_path / "own.yml").write_text("family: t5\n")
    expected = read("--config", str(tmp_path / "own.yml"), *flags, "--save", "7").config
    assert config == expected


def test_a_whole_file_leaves_nothing_open(here):
    config = completed(*AS_FLAGS, "--steps", "3")
    (here / "whole.yml").write_text(dump_yaml(config.to_dict()))
    line = read("--config", "whole.yml")
    assert not line.settings.has_auto_fields
    assert line.config == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: model\nsteps: 3\ntraining.steps: 4\n", "line 3: training.steps stands twice"),
        ("model: model\ntraining: 3\nsteps: 4\n", "line 3: training is 3, but steps is in it"),
        ("model: model\ntraining: {step: 4}\n", "line 2: unknown field training.step"),
        ("steps: 4\n", "nothing says which model"),
        ("model: model\nlayers: {a: 1}\n", "line 2: model.layers is {'a': 1}"),
        ("model: model\nwandb: 3\n", "line 2: wandb is 3, but must be true or false"),
        ("model: model\nprofile: true\n", "line 2: profile is true, but must be a value"),
        ("model: model\nsave_hf: [a]\n", "line 2: save_hf is ['a'], but must be a text or a"),
        ("model: model\noverwrite: true\n\noverwrite: true\n", "stands twice"),
        ("model: model\nrun-dir: a\nrun_dir: b\n", "line 3: run_dir stands twice"),
        (
            "model: model\nlora_r: 8\n",
            "line 2: flags of other trainers: for --lora_r 8 give --adapter.rank 8",
        ),
        (
            "model: model\nnum_train_epochs: 3\n",
            "line 2: flags of other trainers: for --num_train_epochs 3 give --epochs 3",
        ),
        ("model: model\nprocesses: 3\n", "unknown field processes"),
    ],
)
def test_mistakes_in_a_file_have_its_line(text, said, here):
    (here / "own.yml").write_text(text)
    with pytest.raises(ConfigError) as info:
        read("--config", "own.yml")
    assert said in str(info.value)


def test_what_is_given_is_not_said_to_be_chosen(here, capsys):
    (here / "own.yml").write_text("learning_rate: 1e-4\nsequence_length: 16\n")
    completed("--config", "own.yml", *AS_FLAGS, "--warmup_steps", "3")
    (said,) = capsys.readouterr().err.splitlines()
    for word in ("learning rate", "sequence_length", "warm-up"):
        assert word not in said
    for word in ("batch 8", "loss on completion", "3 epochs", "output_length"):
        assert word in said
