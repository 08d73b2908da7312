"""Flags of other trainers: each is answered with flags of ours, and values that these take."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

import run_finetuning
import run_generation
from config.base import config_fields
from config.errors import ConfigError
from config.families import FAMILIES
from config.flags import ALIASES
from config.objectives import OBJECTIVES
from config.other_trainers_flags import FLAGS, OMIT, Flag
from config.unknown_flags import check_foreign_flags, translate_flag
from planning.config_loader import CONFIG_LOADER
from run.options import RunOptions
from terminal.command_line import read_command_line

EXAMPLES = {"N": "4", "DIR": "out", "FILE": "rows.jsonl", "NAMES": "q_proj,v_proj", "RUN/best": "r"}
"""What stands in place of a name in capitals, where commands are tried."""
WHERE = (
    ("qwen3_tiny", run_finetuning), ("tiny", run_finetuning), ("qwen3_tiny", run_generation),
    ("gpt_oss_20b", run_finetuning),
)  # fmt: skip
"""Presets and scripts: one of them takes a flag."""
VALUES = ("2", "0.1", "1e-6", "q_proj,v_proj", "loss", "int8")
"""Some values of others' flags, of which ours take one at least."""


def options() -> list[str]:
    parser = argparse.ArgumentParser()
    RunOptions.add_flags(parser)
    return [flag for action in parser._actions for flag in action.option_strings]


@cache
def problem(advice: str) -> str:
    """Why no script takes flags with their values; "": one does."""
    words = [EXAMPLES.get(word, word) for word in shlex.split(advice)]
    if words[0] in ("--model", "--load", "--adapter.load"):
        return ""  # which are read
    setting = words[0].removeprefix("--training.")
    readers = [name for name, spec in OBJECTIVES.items() if setting in spec.settings]
    words += ["--training.objective", readers[0]] if readers else []
    said = ""
    for preset, script in WHERE:
        given = ["--config", preset, *words]
        kind = "finetuning" if script is run_finetuning else "inference"
        try:
            read_command_line("", kind, "tiny", given, script._add_options, CONFIG_LOADER)
        except ConfigError as error:
            said = said or str(error)
        else:
            return ""
    return said


def commands(text: str) -> list[str]:
    """Our flags, with values, among the words in backticks."""
    return [one for one in re.findall("`(.+?)`", text) if one.startswith("--")]


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.names.split()[0])
def test_ours_is_there_and_takes_the_values(flag: Flag) -> None:
    assert flag.replacement or flag.values or flag.hint
    said = [problem(advice) for advice in commands(flag.hint)]
    said += [problem(flag.replacement_for_choice(v)) for v in flag.values.values() if v != OMIT]
    # What is named alone needs a value.
    assert [one for one in said if one and not re.search("expected .* argument", one)] == []
    if flag.passes_other_values:
        assert any(problem(flag.replacement_with_value(value)) == "" for value in VALUES)


def test_no_flag_of_others_is_ours() -> None:
    named = [name for flag in FLAGS for name in flag.names.split()]
    assert len(set(named)) == len(named) > 200
    ours = {leaf.path for f in FAMILIES.values() for leaf in config_fields(f.config)}
    ours |= ALIASES.keys() | {option[2:].replace("-", "_") for option in options()}
    assert set(named) & ours == {flag.names for flag in FLAGS if flag.native_values}


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--lr 1e-4", "for --lr 1e-4 give --learning_rate 1e-4"),
        ("--lr=-1", "for --lr -1 give --learning_rate -1"),
        ("--bf16", "for --bf16 give --precision bfloat16"),
        ("--bf16 False", "leave out --bf16 False"),
        ("--bf16 0", "leave out --bf16 0"),
        ("--gradient-checkpointing true",
         "for --gradient-checkpointing true give --activations recompute"),
        ("--optim adamw_8bit",
         "for --optim adamw_8bit give --training.optimizer.state 8bit_residual8"),
        ("--optim lion", "there is no --optim lion: give --training.optimizer.name adafactor|adamw "
         "or --training.optimizer.state 8bit_residual8"),
        ("--lr_scheduler_type cosine_with_restarts", "for --lr_scheduler_type cosine_with_restarts "
         "give --training.optimizer.learning_rate.function cosine_with_restarts"),
        ("--lr_scheduler_type warmup_stable_decay", "for --lr_scheduler_type warmup_stable_decay "
         "give --training.optimizer.learning_rate.function wsd"),
        ("--lr_scheduler_type inverse_sqrt", "there is no --lr_scheduler_type inverse_sqrt: give "
         "--training.optimizer.learning_rate.function "
         "linear|cosine|cosine_with_restarts|wsd|constant|relative"),
        ("--label_smoothing 0.1", "for --label_smoothing 0.1 give --training.label_smoothing 0.1"),
        ("--weight_decay 0.1", "for --weight_decay 0.1 give --training.optimizer.weight_decay 0.1"),
        ("--use_cpu", "for --use_cpu give --device cpu"),
        ("--use_cpu x.jsonl", "for --use_cpu x.jsonl give --device cpu"),
        ("--max_length 512", "for --max_length 512 give --sequence_length 512 (of an answer: "
         "`--generation.max_tokens N`)"),
        ("--dataset rows.jsonl", "for --dataset rows.jsonl give --data.train rows.jsonl (of its "
         "own it has sample and mnli)"),
        ("--stage sft --stage dpo",
         "leave out --stage sft; for --stage dpo give --training.objective dpo"),
        ("--use_dora", "for --use_dora give --adapter.rank 8 --adapter.dora true"),
        ("--target_modules q_proj v_proj --seed 1",
         "for --target_modules q_proj,v_proj give --adapter.targets q_proj,v_proj"),
        ("--trainable_token_indices 3 5", "for --trainable_token_indices 3,5 give --adapter.rank 8 "
         "--adapter.trainable_tokens 3,5"),
        ("--lora_r 8 --use_lora", "for --lora_r 8 give --adapter.rank 8; for --use_lora give "
         "--adapter.rank 8"),
        ("--qlora", "for --qlora give --quantization int4 --adapter.rank 8"),
        ("--adapter lora", "for --adapter lora give --adapter.rank 8"),
        ("--adapter folder", "for --adapter folder give --adapter.load folder"),
        ("--overwrite_output_dir", "for --overwrite_output_dir give --overwrite (it deletes the "
         "run that is in `--save DIR`)"),
        ("--dataset_text_field body", "for --dataset_text_field body give --data.target '{body}' "
         "(documents have `--data.format language_modeling`)"),
        ("--metric_for_best_model accuracy", "for --metric_for_best_model accuracy give "
         "--eval.steps 100 --checkpoint.keep_best accuracy (`--load RUN/best` takes them)"),
        ("--zero_stage 2 --output_dir out",
         "there is no --zero_stage: layers stream through the device; `--data_parallel N` and "
         "`--tensor_parallel N` share the work; for --output_dir out give --save out (for "
         "transformers: `--save-hf DIR`)"),
    ],
)  # fmt: skip
def test_a_flag_of_others_is_answered_with_ours(typed: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_foreign_flags(typed.split())
    assert str(caught.value) == f"flags of other trainers: {said}"


def test_our_flag_of_the_same_name_is_ours() -> None:
    check_foreign_flags(["--dataset", "sample", "--dataset=mnli"])


def test_every_answer_is_a_clause() -> None:
    clause = re.compile(
        r"for --flag( x| true)? give --\S(.*\S)?|leave out --flag( x| true)?|"
        r"there is no --flag( x| true)?: \S.*\S"
    )
    said = [translate_flag(flag, "--flag", given) for flag in FLAGS for given in ("", "true", "x")]
    assert [one for one in said if not clause.fullmatch(one) or "  " in one] == []


@pytest.mark.parametrize("script", [run_finetuning, run_generation])
def test_scripts_answer_before_they_ask_for_a_model(script, capsys) -> None:
    assert script.main(["--model_name_or_path", "x", "--seed", "1"]) == 2
    said = "error: flags of other trainers: for --model_name_or_path x give --model x\n"
    assert capsys.readouterr().err == said


@pytest.mark.slow  # imports TRL, PEFT and torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    ["transformers.TrainingArguments", "trl.SFTConfig", "trl.DPOConfig", "trl.KTOConfig",
     "trl.ModelConfig", "trl.ScriptArguments", "peft.LoraConfig"],
)  # fmt: skip
def test_every_field_of_a_configuration_of_theirs_is_answered(name: str) -> None:
    package, _, kind = name.partition(".")
    fields = dataclasses.fields(getattr(pytest.importorskip(package), kind))
    known = {name for flag in FLAGS for name in flag.names.split()} | ALIASES.keys()
    assert [one.name for one in fields if one.name not in known] == []


@pytest.mark.slow  # as above
def test_schedules_of_transformers_are_answered() -> None:
    """By one of ours, or a list of them."""
    from transformers.trainer_utils import SchedulerType

    flag = next(flag for flag in FLAGS if "lr_scheduler_type" in flag.names)
    for one in SchedulerType:
        assert "--training.optimizer.learning_rate.function" in translate_flag(
            flag, "--s", one.value
        )


def test_documents_have_no_flags_of_others() -> None:
    """The commands of the documents are ours."""
    text = "\n".join(path.read_text() for path in Path("docs").glob("*.md"))
    typed = [line.split() for line in text.splitlines() if line.startswith("python3 run_")]
    assert len(typed) > 20
    for words in typed:
        check_foreign_flags(words)
