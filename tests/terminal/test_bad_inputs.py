"""Bad values for every field, as a flag and in a file of one's own: accepted, or one sentence."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from config.base import config_fields
from config.families import FAMILIES
from planning.config_loader import CONFIG_LOADER
from terminal.command_line import read_command_line
from terminal.entry_point import entry_point
from tests.slow import slow

SEED = 41
PRESETS = {"llama": "qwen3_tiny", "t5": "tiny"}
PRESETS |= {name: f"{name}_tiny" for name in ("bart", "t5gemma", "gptj")}
NUMBERS = [
    *("0", "-1", "1.5", "1e400", "-1e-400", "nan", "-inf", "0x10", "1_000", "٣", "9" * 4301),
    *(str(2**63), str(-(2**63)), "1e5", "+1", "1e", "０", "0x" + "f" * 4000),
]
TEXTS = [
    *("", " ", "null", "none", "true", "yes", "~", "[]", "{}", "{a: 1}", "- 1", "a,b", "\\", "\0"),
    *("\n", "\udcff", "é" * 300, "{", "{}{", "%s", "🙂", "--", "a" * 5000, ",", "../..", "*"),
    *("/dev/full", "/proc/self/mem", "/nonexistent/x", "s3://", "file:///", "~root", "**/*"),
]
FIELDS = [
    (family, leaf.path) for family in FAMILIES for leaf in config_fields(FAMILIES[family].config)
]
CASES = [(*field, text, in_file) for field in FIELDS for text in (*NUMBERS, *TEXTS)
         for in_file in (False, True)]  # fmt: skip


@entry_point(single_process=True)
def main(arguments=None):
    read_command_line("", "finetuning", "tiny", arguments, loader=CONFIG_LOADER)


def check(case: tuple[str, str, str, bool], folder: Path, capsys: pytest.CaptureFixture) -> None:
    """Run up to where the configuration is whole; a traceback would come out of `main`."""
    family, name, text, in_file = case
    arguments = ["--config", PRESETS[family], f"--{name}={text}"]
    if in_file:
        lines = f"{name}: {text}\n" + (f"family: {family}\n" if name != "family" else "")
        (folder / "own.yml").write_bytes(lines.encode(errors="surrogateescape"))
        arguments = ["--config", str(folder / "own.yml")]
    code, said = main(arguments), capsys.readouterr().err.splitlines()
    assert code in (0, 2), case
    if code == 2:
        *_, last = said
        assert last.startswith("error: "), case
        assert last.isprintable(), case
        assert len(last) < 400, case


@pytest.mark.parametrize("count", [20, slow(3000)])
def test_no_value_of_any_field_ends_in_a_traceback(count, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    for case in random.Random(SEED).sample(CASES, count):
        check(case, tmp_path, capsys)
