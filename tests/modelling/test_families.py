"""The families share by construction: each is small, and none is a copy of another."""

from __future__ import annotations

import ast
import io
import tokenize
from itertools import combinations
from pathlib import Path

import pytest

from config.families import FAMILIES

ROOT = Path(__file__).parents[2]
LONGEST_COMMON_RUN = 9
OF_FAMILY = {
    # files that are particular to the family, and the most lines of code they may have
    "gptj": (
        [
            "modelling/gptj",
            "config/gptj.py",
            "data/causal.py",
            "data/sample/train_gptj_tokenizer.py",
        ],
        700,
    ),
    "t5": (["modelling/t5", "config/t5.py", "data/encoding.py", "data/generated.py"], 900),
}
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def files_of(family: str) -> list[Path]:
    paths = [ROOT / path for path in OF_FAMILY[family][0]]
    return sorted(f for path in paths for f in ([path] if path.is_file() else path.rglob("*.py")))


def code_lines(source: str) -> int:
    """Lines with code: no comments, docstrings or empty lines."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def test_code_lines_are_counted():
    assert code_lines('"""Doc."""\n\nx = (\n    1,\n)  # why\n\n# why\ny = """a\nb"""\n') == 5


@pytest.mark.parametrize("family", OF_FAMILY)
def test_a_family_is_small(family):
    count = sum(code_lines(path.read_text("utf-8")) for path in files_of(family))
    assert 0 < count < OF_FAMILY[family][1]


def common_run(one: list[str], other: list[str]) -> list[str]:
    """The longest run of equal lines."""
    best, lengths = (0, 0), [0] * (len(other) + 1)
    for i, line in enumerate(one):
        new = [0] * (len(other) + 1)
        for j, theirs in enumerate(other):
            if line == theirs:
                new[j + 1] = lengths[j] + 1
                best = max(best, (new[j + 1], i + 1))
        lengths = new
    length, end = best
    return one[end - length : end]


def test_a_common_run_is_found():
    assert common_run(list("xabcy"), list("zabcdabc")) == list("abc")


@pytest.mark.parametrize(("one", "other"), list(combinations(OF_FAMILY, 2)))
def test_families_have_no_lines_in_common(one, other):
    """Neither the code of the models nor their configurations."""
    for path in [*files_of(one), ROOT / f"config/{one}.py"]:
        for theirs in [*files_of(other), ROOT / f"config/{other}.py"]:
            lines = [
                [line.strip() for line in p.read_text("utf-8").splitlines() if line.strip()]
                for p in (path, theirs)
            ]
            run = common_run(*lines)
            assert len(run) <= LONGEST_COMMON_RUN, f"{path} and {theirs}: {run}"


def test_all_families_are_looked_at():
    assert OF_FAMILY.keys() == FAMILIES.keys()
