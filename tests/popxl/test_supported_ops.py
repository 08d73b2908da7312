"""docs/supported_ops.md is what the registry says now."""

from __future__ import annotations

import re

from popxl import ops
from popxl._ir.opdef import registry
from runtime.tools import supported_ops

PAGE = supported_ops.PAGE.read_text("utf-8")


def test_the_page_is_up_to_date():
    assert supported_ops.page() == PAGE, "run: python -m runtime.tools.supported_ops"


def test_the_page_names_each_function_and_each_op():
    shown = set(re.findall(r"`([\w.]+)`", PAGE))
    functions = {f"ops.{n}" for n in ops.__all__ if type(getattr(ops, n)).__name__ == "function"}
    functions |= {f"ops.var_updates.{name}" for name in ops.var_updates.__all__}
    assert functions - shown == set()
    ours = {n for n, d in registry().items() if d.home.startswith("popxl")}
    assert ours - shown == set()


def test_what_the_page_says_of_an_op():
    rows = {line.split(" | ")[0]: line for line in PAGE.splitlines() if line.startswith("| `")}
    assert rows["| `exp`"] == "| `exp` | `ops.exp`, `ops.exp_` | `jnp.exp` | own rule | floats |"
    assert rows["| `argmax`"].endswith("| `jnp.argmax` | none: integer output | any |")
    assert rows["| `sumsquare`"].endswith("`jnp.sum` | JAX's | numbers |")
    assert rows["| `sub`"].endswith("| numbers, alike |")
