"""Command lines: flags for every field, one sentence and exit code 2 for every mistake."""

from __future__ import annotations

import argparse
import logging
import re
from pathlib import Path

import pytest
import transformers

import run_finetuning
import run_generation
from config.base import config_fields, flatten_by_path
from config.errors import ConfigError, UserError
from config.families import FAMILIES
from config.flags import (
    ALIASES,
    add_field_flags,
    add_section_groups,
    normalize_flag_spelling,
    parse_field_overrides,
    shortest_flag,
)
from config.t5 import T5Config
from terminal.command_line import read_command_line
from terminal.entry_point import entry_point
from terminal.parser import Parser


def add_options(parser):
    parser.add_argument("--run-dir")
    parser.add_argument("--wandb", action="store_true")
    parser.add_argument("--wandb-name")


def read(*arguments):
    return read_command_line("A test.", "finetuning", "small", arguments, add_options)


@pytest.mark.parametrize(
    "flags",
    [
        ("--micro_batch_size", "4"),
        ("--micro-batch-size", "4"),
        ("--micro_batch_size=4",),
        ("--execution.micro_batch_size", "4"),
        ("--execution.micro-batch-size=4",),
        ("--micro_batch_size", "2", "--micro_batch_size", "4"),
    ],
)
def test_one_field_by_many_names(flags):
    assert read(*flags).config.execution.micro_batch_size == 4


def test_shared_names():
    """`--steps` is the training's; the checkpoint's field of that name needs its dots."""
    config = read("--steps", "7", "--checkpoint.steps", "3").config
    assert (config.training.steps, config.checkpoint.steps) == (7, 3)


def test_an_alias_is_for_good():
    """A command that was right stays so when fields are added: each alias names its one field."""
    for alias, field in ALIASES.items():
        assert "." not in alias
        assert sum(
            field in {leaf.path for leaf in config_fields(f.config)} for f in FAMILIES.values()
        )
    assert len(set(ALIASES.values())) == len(ALIASES)
    assert not {leaf.path for leaf in config_fields(T5Config)} & ALIASES.keys()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", False),
        ("--model.eval", True),
        ("--model.eval true", True),
        ("--model.eval=false", False),
    ],
)
def test_booleans(flags, expected):
    assert read(*flags.split()).config.model.eval is expected


def test_null_switches_off():
    assert (
        read(
            "--training.optimizer.gradient_clipping", "null"
        ).config.training.optimizer.gradient_clipping
        is None
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spelled", [str, lambda name: name.replace("_", "-")], ids=["_", "-"])
def test_every_field_is_a_flag_by_its_dotted_name(family, spelled):
    """Each is given a value that is not its default, if it can have one; all at once."""
    config = FAMILIES[family].config
    wanted = {leaf.path: _other_value(leaf, config()) for leaf in config_fields(config)}
    given = [f"--{spelled(name)}={str(value).lower()}" for name, value in wanted.items()]
    parser = argparse.ArgumentParser()
    add_field_flags(add_section_groups(parser), config, lambda leaf: "")
    parsed = vars(parser.parse_args(normalize_flag_spelling(given, config, ())))
    found = flatten_by_path(parse_field_overrides(parsed, config))
    assert found == wanted
    assert [type(value) for value in found.values()] == [type(v) for v in wanted.values()]


def test_a_parser_reads_the_arguments_of_the_process(monkeypatch):
    """As benchmarks do, which give it none."""
    parser = Parser()
    parser.add_argument("--folder")
    parser.add_argument("--between")
    monkeypatch.setattr("sys.argv", ["program", "--folder", "x", "--between", "->"])
    assert vars(parser.parse_args()) == {"folder": "x", "between": "->"}


def _other_value(leaf, config):
    default = config
    for name in leaf.path.split("."):
        default = getattr(default, name)
    kind = leaf.type.kind
    values = leaf.type.choices or {
        bool: (True, False), int: (1, 2), float: (0.25, 0.5),
        str: ("s3://this", "s3://that", "1", "full_attention"),
    }[kind]  # fmt: skip
    rule = leaf.type.rule
    possible = (x for x in values if rule is None or kind is not str or rule.holds(x))
    return next((value for value in possible if value != default), default)


def test_options_of_the_script():
    line = read("--config", "tiny", "--wandb", "--wandb_name", "x", "--run-dir=here")
    assert line.preset == "tiny"
    assert vars(line.options) == {
        "config": "tiny",
        "wandb": True,
        "wandb_name": "x",
        "run_dir": "here",
    }


def test_help_shows_fields_docs_and_presets(capsys):
    with pytest.raises(SystemExit) as info:
        read("--help")
    assert info.value.code == 0
    shown = capsys.readouterr().out
    for piece in (
        "--micro_batch_size INT",
        "Samples that one device computes at once [16]",
        "bart_tiny",
    ):
        assert piece in shown
    assert "xxl_pod64" not in shown, "of all presets --help-all tells"
    with pytest.raises(SystemExit):
        read("--help-all")
    assert "xxl_pod64" in capsys.readouterr().out


class Mishap(Exception):
    pass


@entry_point(Mishap)
def main(arguments=None):
    read(*arguments)
    if "--model.eval" in arguments:
        raise Mishap("two\nlines")
    if "--wandb" in arguments:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--config tny", "unknown preset 'tny' in finetuning.yml; did you mean tiny?"),
        ("--config no.yml", "cannot read no.yml: No such file or directory"),
        ("--config", "argument --config: expected one argument; see --help"),
        (
            "--micro_batch_sise 3",
            "unknown option --micro_batch_sise; did you mean --micro_batch_size or "
            "--global_batch_size?",
        ),
        ("--wandb_nam x", "unknown option --wandb_nam; did you mean --wandb-name or --wandb?"),
        ("--qqqq x", "unknown option --qqqq; --help-all lists all of them"),
        (
            "--checkpoint.step 3",
            "unknown option --checkpoint.step; did you mean --checkpoint.steps or --save or "
            "--to_keep?",
        ),
        (
            "--checkpoint 3",
            "--checkpoint is a section; set a field of it: --load or --save or "
            "--checkpoint.mirror or --checkpoint.steps or --checkpoint.minutes or --to_keep or "
            "--checkpoint.keep_best or --checkpoint.save_optimizer or "
            "--checkpoint.base_model or --checkpoint.load_optimizer or "
            "--checkpoint.allow_nonfinite",
        ),
        ("--layers x", "model.layers is 'x', but must be an integer from 1 to 1024"),
        ("--layers=--", "model.layers is '--', but must be an integer from 1 to 1024"),
        ("--layers", "argument --layers: expected one argument; see --help"),
        ("--model.eval maybe", "model.eval is 'maybe', but must be true or false"),
        (
            "--dataset imdb",
            "flags of other trainers: for --dataset imdb give --data.train imdb (of its own it has "
            "sample and mnli)",
        ),
        ("stray", "unrecognized arguments: stray; see --help"),
        (
            "--micro_batch_size 5",
            "training.global_batch_size 64 must be divisible by execution.micro_batch_size 5 × "
            "execution.data_parallel 1 = 5",
        ),
        ("--model.eval", "two lines"),
    ],
)
def test_mistakes_end_in_one_sentence(capsys, arguments, sentence):
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.err == f"error: {sentence}\n"
    assert captured.out == ""


def test_help_fits_two_screens_and_all_of_it_can_be_had(capsys):
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            read(flag)
    short, whole = capsys.readouterr().out.split("A test.")[1:]
    assert len(short.splitlines()) <= 100
    assert max(map(len, short.splitlines())) <= 100
    for flag in ("--data.train", "--data.prompt", "--learning_rate"):
        assert flag in short
    assert "--temperature" not in short, "which this script does not use"
    for leaf in config_fields(T5Config):
        assert f"--{shortest_flag(leaf.path)}" in whole
    assert "HF: num_heads" in " ".join(whole.split())


@pytest.mark.parametrize("script", [run_finetuning, run_generation])
def test_help_begins_with_what_people_look_for_and_ends_its_sentences(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["--help"])
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 100
    assert "..." not in re.sub(r"\[(--FIELD VALUE|PROMPT|STR) \.\.\.\]", "", shown)
    places = [shown.index(f"\n  {flag} ") for flag in ("--model", "--data.train", "--load")]
    assert places == sorted(places)
    assert "--precision {float32,float16,bfloat16}" in shown
    flag = shown[shown.index("  --sequence_length") :].split("\n  --")[0]
    assert flag.endswith("[chosen]"), "of which no preset tells"


def helped(main, *arguments: str, capsys) -> str:
    with pytest.raises(SystemExit):
        main([*arguments, "--help"])
    return capsys.readouterr().out


LOOKED_FOR = {
    run_finetuning: "data.format data.packing data.loss_on examples_per_sample "
    "training.objective epochs adapter.rank adapter.targets adapter.load quantization "
    "output_length decoder_sequence_length checkpoint.keep_best eval.steps wandb",
    run_generation: "quantization adapter.load temperature top_p generation.max_tokens chat "
    "output_length decoder_sequence_length examples_per_sample",
}


@pytest.mark.parametrize("script", LOOKED_FOR)
@pytest.mark.parametrize("preset", [None, "tiny", "gptj_tiny", "qwen3_tiny"])
def test_help_shows_what_most_people_look_for(script, preset, capsys):
    """Without a model, what models of any family have."""
    shown = helped(script.main, *(["--config", preset] if preset else []), capsys=capsys)
    missing = {name for name in LOOKED_FOR[script].split() if f"\n  --{name} " not in shown}
    decoders = {"data.packing", "data.loss_on", "output_length"}
    if preset is None:
        assert missing == set()
    else:
        assert missing <= (decoders if preset == "tiny" else {"decoder_sequence_length"})
    assert len(shown.splitlines()) <= 100


def values(shown: str) -> dict[str, str]:
    """What help has in brackets, by flag."""
    texts = re.findall(r"\n  --(\S+)([^\n]*(?:\n {10}[^\n]*)*)", shown)
    return {flag: value[1] for flag, text in texts if (value := re.search(r"\[(\S+)\]$", text))}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], {"steps": None, "epochs": "3", "dataset": None, "examples_per_sample": None}),
        (["--config", "tiny"], {"steps": "700", "epochs": None, "dataset": "sample"}),
        (["--config", "gptj_small"], {"epochs": "3", "steps": None, "examples_per_sample": "1"}),
        (["--config", "own.yml"], {"epochs": "3", "steps": None}),
        (["--config", "steps.yml"], {"epochs": None, "steps": "7"}),
    ],
)
def test_help_shows_no_number_that_is_not_used(given, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yml").write_text("family: t5\nlearning_rate: 1e-4\n")
    (tmp_path / "steps.yml").write_text("family: t5\nsteps: 7\n")
    shown = values(helped(run_finetuning.main, *given, capsys=capsys))
    assert {name: shown.get(name) for name in expected} == expected


def test_transformers_keeps_its_advice_on_pytorch_alone_to_itself(caplog, monkeypatch):
    """It is given when transformers is imported without PyTorch, which users need not have."""
    assert main([]) == 0  # as every script begins
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "propagate", True)
    source = Path(transformers.__file__).read_text(encoding="utf-8")
    (advice,) = re.findall(r'logger.warning_advice\(\s*"(PyTorch[^"]*)"', source)
    with caplog.at_level(logging.WARNING, "transformers"):
        logger.warning(advice)
        logger.warning("something else")
    assert set(caplog.messages) == {"something else"}


def test_other_endings(capsys):
    assert main([]) == 0
    assert main(["--wandb"]) == 130
    assert capsys.readouterr().err == ("interrupted by SIGINT: what was saved before is intact\n")


def test_a_long_sentence_loses_no_word_but_the_middle_of_paths(capsys):
    folder, file = "/home/" + "a" * 500, "b" * 300 + ".jsonl"

    @entry_point()
    def mistaken(arguments=None):
        raise UserError(f"{folder} has no\n {file}, {'which is needed ' * 10}: give another")

    assert mistaken([]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(
        rf"error: /home/aa+…a+ has no bb+…b+.jsonl, {'which is needed ' * 10}: give another\n", said
    )
    assert len(said) <= 310


def test_defects_keep_their_traceback():
    @entry_point()
    def broken(arguments=None):
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        broken()
    assert not issubclass(ValueError, UserError)


@pytest.mark.parametrize(
    ("flags", "search"),
    [
        (["--top_k", "4"], "sample"),
        (["--temperature", "0.5", "--top_p", "0.9"], "sample"),
        (["--num_beams", "2"], "beam"),
        (["--num_beams", "2", "--search", "beam"], "beam"),
        ([], "greedy"),
    ],
)
def test_a_setting_of_a_search_chooses_it(flags, search):
    line = read_command_line("", "inference", "tiny", flags)
    assert line.config.generation.search == search


@pytest.mark.parametrize(
    "flags", [["--top_k", "4", "--num_beams", "2"], ["--search", "greedy", "--num_beams", "2"]]
)
def test_settings_of_another_search_are_refused(flags):
    with pytest.raises(ConfigError, match="belongs to the search"):
        read_command_line("", "inference", "tiny", flags)


# ---- values as others write them ----------------------------------------------------------------
@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("--precision bf16", "model.precision", "bfloat16"),
        ("--precision FP16", "model.precision", "float16"),
        ("--precision=fp32", "model.precision", "float32"),
        ("--precision torch.bfloat16", "model.precision", "bfloat16"),
        ("--precision popxl.float16", "model.precision", "float16"),
        ("--training.optimizer.name AdamW", "training.optimizer.name", "adamw"),
        ("--device cuda", "execution.device", "gpu"),
        ("--model.eval True", "model.eval", True),
        ("--checkpoint.save_optimizer False", "checkpoint.save_optimizer", False),
        ("--learning_rate 1e-4", "training.optimizer.learning_rate.maximum", 1e-4),
        ("--learning_rate=1E-4", "training.optimizer.learning_rate.maximum", 1e-4),
        ("--eval.samples None", "eval.samples", None),
    ],
)  # fmt: skip
def test_values_as_others_write_them(flag, field, value):
    assert flatten_by_path(read(*flag.split()).config.to_dict())[field] == value


def test_other_spellings_are_of_choices_alone():
    """A text keeps its letters, and what is no spelling of a choice is refused."""
    assert (
        read("--data.prompt", "BF16 {x}", "--data.target", "{y}").config.data.prompt == "BF16 {x}"
    )
    for wrong in ("bf8", "cuda", "bfloat", "torch"):
        with pytest.raises(ConfigError, match="must be one of float32, float16, bfloat16"):
            read("--precision", wrong)


@pytest.mark.parametrize("text", ["->", "-> ", "- ", "---", "-", "-x", "-1", "-->", "=>"])
@pytest.mark.parametrize("after", [(), ("--seed", "7"), ("--wandb",)])
def test_a_value_may_begin_with_a_dash(text, after):
    arguments = ("--config", "gptj_tiny", "--data.separator", text, *after)
    line = read(*arguments)
    assert line.config.data.separator == text
    assert line.config.model.seed == (7 if "--seed" in after else 42)
    assert line.options.wandb == ("--wandb" in after)


@pytest.mark.parametrize("after", [("--seed", "7"), ("--wandb",), ()])
def test_a_flag_is_no_value(after):
    with pytest.raises(ConfigError, match=r"--data.separator: expected one argument"):
        read("--config", "gptj_tiny", "--data.separator", *after)
    assert read("--wandb", "--seed", "-0").options.wandb
