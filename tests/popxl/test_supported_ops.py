"""The list in docs/ops.md is what the registry says now."""

from __future__ import annotations

import re

from popxl import ops
from popxl._ir.opdef import registry
from runtime.tools import supported_ops

PAGE = supported_ops.PAGE.read_text("utf-8")
LIST = PAGE.partition("<!-- supported ops -->")[2]


def test_the_list_is_up_to_date():
    assert supported_ops.rewritten(PAGE) == PAGE, "run: python -m runtime.tools.supported_ops"


def test_the_list_names_each_function_and_each_op():
    shown = set(re.findall(r"`([\w.]+)`", LIST))
    functions = {f"ops.{n}" for n in ops.__all__ if type(getattr(ops, n)).__name__ == "function"}
    functions |= {f"ops.var_updates.{name}" for name in ops.var_updates.__all__}
    assert functions - shown == set()
    ours = {n for n, d in registry().items() if d.home.startswith("popxl")}
    assert ours - {name.rpartition(".")[2].removesuffix("_") for name in shown} == set()


def test_what_the_list_says_of_an_op():
    rows = LIST.splitlines()
    assert "| `ops.exp`, `ops.exp_` | own | floats |" in rows
    assert "| `ops.argmax` | none | numbers |" in rows
    assert any(row.endswith("| any |") for row in rows)
    assert "| `ops.sumsquare` | JAX's | numbers |" in rows
    assert "| `ops.sub` | own | numbers, alike |" in rows
    assert "| `ops.attention` (op `fused_attention`) | own | floats |" in rows
    assert "- integer output: `argmax`, `argmin`, `fp8_mse_scale`, `histogram`" in rows
