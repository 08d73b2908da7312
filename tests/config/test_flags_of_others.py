"""Flags of other trainers: each is answered with one that there is, and a value that it takes."""

from __future__ import annotations

import argparse

import pytest

import run_finetuning
import run_generation
from config.base import leaves
from config.errors import ConfigError
from config.families import FAMILIES
from config.flags import ALIASES, field_overrides, spell_flags
from config.flags_of_others import FLAGS, Flag, check_flags
from run.options import RunOptions


def options() -> list[str]:
    parser = argparse.ArgumentParser()
    RunOptions.add_flags(parser)
    return ["--model", *(flag for action in parser._actions for flag in action.option_strings)]


def takes(family: str, arguments: list[str]) -> bool:
    """Whether a family has the flag; raises ConfigError if that does not take the value."""
    config = FAMILIES[family].config
    try:
        flag, *value = spell_flags(arguments, config, options())
    except ConfigError:
        return False
    dotted = ALIASES.get(flag[2:], flag[2:])
    if value:
        assert field_overrides({dotted: value[0]}, config)
    return True


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.names.split()[0])
def test_ours_is_there_and_takes_the_values(flag: Flag) -> None:
    assert flag.ours or flag.says
    for value in (flag.values or {"": ""}).values():
        arguments = f"{flag.ours} {value}".split()
        found = [takes(family, arguments) for family in FAMILIES] if arguments else [True]
        assert any(found)


def test_no_flag_of_others_is_ours() -> None:
    named = [name for flag in FLAGS for name in flag.names.split()]
    assert len(set(named)) == len(named) > 30
    ours = {leaf.dotted for f in FAMILIES.values() for leaf in leaves(f.config)}
    assert not set(named) & (ours | ALIASES.keys() | {o[2:].replace("-", "_") for o in options()})


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--lr 1e-4", "--lr 1e-4 is --learning_rate 1e-4"),
        ("--lr=-1", "--lr -1 is --learning_rate -1"),
        ("--bf16", "--bf16 is --precision bfloat16"),
        ("--bf16 False", "--bf16 False is left out"),
        ("--gradient-checkpointing true",
         "--gradient-checkpointing true is --activations recompute"),
        ("--optim adamw_8bit",
         "--optim is --training.optimizer.name, which has: adafactor, adamw"),
        ("--use_cpu", "--use_cpu is --device cpu"),
        ("--lora_r 8 --use_lora", "--lora_r 8 is --adapter.rank 8; --use_lora is not there: "
         "--adapter.rank 8 trains adapters"),
        ("--load_in_4bit", "--load_in_4bit is --quantisation int4"),
        ("--zero_stage 2 --output_dir out",
         "--zero_stage is not there: layers stream through the device; --data_parallel, "
         "--tensor_parallel split the work; --output_dir out is --save out"),
    ],
)  # fmt: skip
def test_a_flag_of_others_is_answered_with_ours(typed: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_flags(typed.split())
    assert str(caught.value) == said


@pytest.mark.parametrize("script", [run_finetuning, run_generation])
def test_scripts_answer_before_they_ask_for_a_model(script, capsys) -> None:
    assert script.main(["--model_name_or_path", "x", "--seed", "1"]) == 2
    assert capsys.readouterr().err == "error: --model_name_or_path x is --model x\n"
