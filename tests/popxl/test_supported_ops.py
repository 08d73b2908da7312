"""The list in docs/ops.md is what the registry says now."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from popxl import ops
from popxl._ir.op_registry import registry
from popxl.lazy_exports import load_all
from runtime.tools import supported_ops

PAGE = supported_ops.PAGE.read_text("utf-8")
LIST = PAGE.partition("<!-- supported ops -->")[2]


def test_the_list_is_up_to_date():
    assert supported_ops.rewrite_page(PAGE) == PAGE, "run: python -m runtime.tools.supported_ops"


def test_the_list_names_each_function_and_each_op():
    shown = set(re.findall(r"`([\w.]+)`", LIST))
    load_all("popxl")
    functions = {f"ops.{n}" for n in ops.__all__ if type(getattr(ops, n)).__name__ == "function"}
    functions |= {f"ops.var_updates.{name}" for name in ops.var_updates.__all__}
    assert functions - shown == set()
    ours = {n for n, d in registry().items() if d.home.startswith("popxl")}
    assert ours - {name.rpartition(".")[2].removesuffix("_") for name in shown} == set()


def rows() -> Iterator[tuple[str, str, set[str]]]:
    """Gradient, types and functions of each row of the table."""
    for gradient, types, functions in re.findall(r"^(.*?) \| (.*?) \| (`.*)$", LIST, re.M):
        yield gradient, types, set(functions.split(", "))


@pytest.mark.parametrize(
    ("function", "gradient", "types"),
    [
        ("`ops.exp_`", "own", "floats"),
        ("`ops.argmax`", "none", "numbers"),
        ("`ops.sumsquare`", "JAX's", "numbers"),
        ("`ops.sub`", "own", "numbers, alike"),
        ("`ops.attention` (op `fused_attention`)", "own", "floats"),
    ],
)
def test_what_the_list_says_of_an_op(function, gradient, types):
    assert [(g, t) for g, t, functions in rows() if function in functions] == [(gradient, types)]


def test_a_reason_for_no_gradient():
    assert "- integer output: `argmax`, `argmin`, `fp8_mse_scale`, `histogram`" in LIST.splitlines()
