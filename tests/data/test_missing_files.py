"""Data files that are missing are said before anything is imported, let alone compiled."""

from __future__ import annotations

import subprocess
import sys

import pytest

from config.errors import UserError
from config.sections import Data
from data.task import check_task_and_files

RUN = """
import sys
import run_finetuning, run_validation
code = {main}.main({arguments!r})
assert not {{"jax", "transformers"}} & set(sys.modules), "imported before the file was looked for"
sys.exit(code)
"""


@pytest.mark.parametrize("main", ["run_finetuning", "run_validation"])
def test_a_missing_file_is_said_at_once(main):
    arguments = ["--config", "tiny", "--data.train", "nope.jsonl", "--data.validation", "0.1"]
    program = RUN.format(main=main, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert "cannot read nope.jsonl: No such file or directory" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "given",
    [{"train": "a.csv"}, {"train": "{here},b.csv"}, {"train": "{here}", "validation": "c.txt"}],
)
def test_every_file_is_looked_for(tmp_path, given):
    here = tmp_path / "a.jsonl"
    here.write_text("")
    with pytest.raises(UserError, match="cannot read .*: No such file"):
        check_task_and_files(Data(**{name: text.format(here=here) for name, text in given.items()}))
    check_task_and_files(Data(train=str(here)))
    check_task_and_files(Data(dataset="mnli"))
