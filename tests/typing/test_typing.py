"""The types of popxl and popxl_addons serve who checks a program strictly."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("program.py")
SOURCES = Path(__file__).parents[2] / "runtime" / "src"


@pytest.mark.parametrize("package", ["popxl", "popxl_addons", "popart", "popdist"])
def test_packages_say_that_they_are_typed(package):
    assert resources.files(package).joinpath("py.typed").is_file()


@pytest.mark.slow
def test_the_typed_program_runs():
    result = subprocess.run([sys.executable, PROGRAM], text=True, capture_output=True, check=True)
    assert result.stdout.startswith("(16,)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("", ""), None),
        (("ir.num_host_transfers = 1", "ir.num_host_transfers = '1'"), "Incompatible types"),
        (("ops.gelu(self.first(x))", "ops.gelu('x')"), 'incompatible type "str"'),
        (("popxl.float32, name", "np.float32, name"), 'expected "dtype"'),
    ],
    ids=["as written", "attribute", "tensor", "dtype"],
)
def test_mypy_checks_a_program_strictly(tmp_path, change, complaint):
    text = PROGRAM.read_text("utf-8")
    assert change[0] in text
    program = tmp_path / "program.py"
    program.write_text(text.replace(*change, 1), "utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", program]
    result = subprocess.run(
        command, text=True, capture_output=True, cwd=tmp_path, check=False,
        env={**os.environ, "MYPYPATH": str(SOURCES)},
    )  # fmt: skip
    if complaint is None:
        assert result.stdout.startswith("Success"), result.stdout
    else:
        assert complaint in result.stdout
