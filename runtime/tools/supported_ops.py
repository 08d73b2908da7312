"""Write docs/supported_ops.md from the registry of ops and the source of their definitions.

    python -m runtime.tools.supported_ops

What an op lowers to, and which functions make it, is read off the syntax trees of its module.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import popxl_addons.ops
from popxl import ops
from popxl._ir.opdef import NoGrad, OpDef, registry
from runtime.tools.compare_api import absent

PAGE = Path(__file__).parents[2] / "docs" / "supported_ops.md"

_INTRODUCTION = """\
# Supported ops

Written by `python -m runtime.tools.supported_ops`; a test fails when it is out of date.

- **Functions**: `ops` is `popxl.ops`, `addons` is `popxl_addons.ops`. A name that ends in `_` works
  in place, or gives a view where the op has one.
- **Lowering**: the JAX functions that the op's meaning is made of.
- **Gradient**: *own rule*: written for the op; *JAX's*: the vector-Jacobian product of the
  lowering; otherwise why there is none.
- **Dtypes**: *floats*: floating-point types but float8, computed in float32 for half types;
  *numbers*: all types but float8; *any*: what the lowering accepts; *alike*: all inputs have one
  dtype. Nothing is converted implicitly.

`popxl.custom.jax_op` makes further ops of JAX functions: see [custom_ops.md](custom_ops.md).
"""
_HEADER = "| op | functions | lowering | gradient | dtypes |\n| --- | --- | --- | --- | --- |\n"
_COMPOSED = """
## Made of other ops

| function | made of |
| --- | --- |
"""
_MADE_BY_TRANSFORMS = """
## Made by transforms and gradients

"""
_ABSENT = """
## Names of PopXL that are absent

All other public names of `popxl` and `popxl_addons` exist, with PopXL's parameters and defaults:
`python -m runtime.tools.compare_api` compares.
"""


# ---- syntax trees -------------------------------------------------------------------------------
@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _used(module: str, node: ast.AST, seen: set[str]) -> Iterator[str]:
    """Dotted names in `node`, and in the functions of popxl that it uses; in order."""
    for name in _names(node):
        yield name
        if "." not in name and name not in seen:
            seen.add(name)
            home, body = _meaning_of(module, name)
            if body is not None:
                yield from _used(home, body, seen)


def _meaning_of(module: str, name: str) -> tuple[str, ast.AST | None]:
    """The function or table that a name stands for in a module, and where it is written."""
    for node in _tree(module).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return module, node.value if isinstance(node.value, ast.Dict) else None
    value = getattr(importlib.import_module(module), name, None)
    home = getattr(value, "__module__", None) or ""
    if isinstance(value, FunctionType) and home.startswith("popxl") and home != module:
        return _meaning_of(home, value.__name__)
    return module, None


def _names(node: ast.AST) -> Iterator[str]:
    """Maximal dotted names in source order, annotations left out."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        text = ast.unparse(node)
        if all(part.isidentifier() for part in text.split(".")):
            yield text
            return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _names(child)


def _lowering_node(defn: OpDef) -> ast.AST | None:
    """The argument of `define` that gives the op its meaning."""
    for node in ast.walk(_tree(defn.home)):
        if isinstance(node, ast.Call) and node.args[:1] and ast.unparse(node.func) == "define":
            name = node.args[0]
            if isinstance(name, ast.Constant) and name.value == defn.name and node.args[1:]:
                return node.args[1]
    # Defined in a function for several names: find the lowering by where it is written.
    assert isinstance(defn.lower, FunctionType)
    if defn.lower.__name__ != "<lambda>":
        return _meaning_of(defn.lower.__module__, defn.lower.__name__)[1]
    lambdas = (n for n in ast.walk(_tree(defn.home)) if isinstance(n, ast.Lambda))
    return next((n for n in lambdas if n.lineno == defn.lower.__code__.co_firstlineno), None)


# ---- functions ----------------------------------------------------------------------------------
@cache
def _public_functions() -> dict[str, FunctionType]:
    """Name as the page shows it -> function."""
    found: dict[str, Any] = {f"ops.{name}": getattr(ops, name) for name in ops.__all__}
    for part in ("collectives", "fp8", "var_updates"):
        module = getattr(ops, part)
        found.update((f"ops.{part}.{name}", getattr(module, name)) for name in module.__all__)
    for module in _modules(popxl_addons.ops):
        found.update(
            (f"addons.{name}", value)
            for name in getattr(module, "__all__", ())
            if getattr(value := getattr(module, name), "__module__", "") == module.__name__
        )
    return {n: f for n, f in found.items() if isinstance(f, FunctionType)}


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(info.name)


def _ops_of(function: FunctionType) -> tuple[list[str], list[str]]:
    """Ops that a function makes itself, and functions by which it makes others."""
    if isinstance(defn := getattr(function, "defn", None), OpDef):
        return [defn.name], []
    module, node = _meaning_of(function.__module__, function.__name__)
    assert node is not None, function
    public = {f.__name__ for f in _public_functions().values()}
    made, called = [], []
    for name in _used(module, node, {function.__name__}):
        value = getattr(importlib.import_module(module), name, None)
        last = name.rpartition(".")[2]
        if isinstance(value, OpDef):
            made.append(value.name)
        if name.startswith("ops.") and last in public:
            called.append(last)
    return list(dict.fromkeys(made)), sorted(set(called))


# ---- what is said of an op ----------------------------------------------------------------------
_JAX = ("jnp", "lax", "jax", "collective")
_PLAIN = {
    "Array", "asarray", "dtype", "finfo", "float32", "floating", "iinfo", "inexact", "int32",
    "int64", "integer", "issubdtype", "ndarray", "promote_types", "uint32", "vjp",
}  # fmt: skip


def _lowering(defn: OpDef) -> tuple[str, str]:
    """What an op lowers to, and the types it takes."""
    if defn.execute is not None:
        what = (inspect.getdoc(defn.execute) or "nothing: a hint").partition("\n")[0]
        return what, "any"
    if defn.regions is not None:
        return "the ops of the graphs it runs", "any"
    node = _lowering_node(defn)
    used = [] if node is None else list(_used(defn.home, node, set()))
    found = [n for n in used if n.split(".")[0] in _JAX[:4] and "." in n and not _is_plain(n)]
    types = "any"
    if {"numbers", "check_arithmetic"} & set(used):
        types = "numbers"
    if {"floats", "check_floating"} & set(used):
        types = "floats"
    text = ", ".join(f"`{n}`" for n in dict.fromkeys(found)) or _expression(defn.home, node)
    return text, types + (", alike" if defn.dtypes == "same" else "")


def _is_plain(name: str) -> bool:
    return bool(_PLAIN & set(name.split(".")))


def _expression(module: str, node: ast.AST | None) -> str:
    """What a lowering without JAX functions computes."""
    if isinstance(node, ast.Name):
        module, node = _meaning_of(module, node.id)
    if isinstance(node, ast.Call) and isinstance(node.args[0], ast.Lambda):
        node = node.args[0]  # what makes a meaning of a formula
    if isinstance(node, ast.Lambda):
        node = node.body
    if isinstance(node, ast.FunctionDef):
        node = next((n.value for n in reversed(node.body) if isinstance(n, ast.Return)), None)
    return "" if node is None else f"`{ast.unparse(node)}`"


def _gradient(defn: OpDef) -> str:
    if isinstance(defn.grad, NoGrad):
        return f"none: {defn.grad.reason}"
    return "JAX's" if defn.grad is None else "own rule"


def _row(defn: OpDef, functions: list[str]) -> str:
    lowering, types = _lowering(defn)
    names = ", ".join(f"`{f}`" for f in functions)
    cells = (f"`{defn.name}`", names, lowering, _gradient(defn), types)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


# ---- the page -----------------------------------------------------------------------------------
def page() -> str:
    """The text of docs/supported_ops.md."""
    by_op: dict[str, list[str]] = defaultdict(list)
    composed: list[str] = []
    for name, function in sorted(_public_functions().items()):
        made, called = _ops_of(function)
        for op in made:
            by_op[op].append(name)
        if called and not made:
            composed.append(f"| `{name}` | {', '.join(f'`{c}`' for c in called)} |\n")
        refused = "raise NotImplementedError" in inspect.getsource(function)
        if refused and not called and not made:
            composed.append(f"| `{name}` | nothing: it is refused |\n")
    ours = {n: d for n, d in sorted(registry().items()) if d.home.partition(".")[0] in _PACKAGES}
    rows = [_row(d, by_op[n]) for n, d in ours.items() if n in by_op]
    hidden = [_row(d, []) for n, d in ours.items() if n not in by_op]
    return "".join(
        [_INTRODUCTION, "\n## Ops\n\n", _HEADER, *rows, _COMPOSED, *composed,
         _MADE_BY_TRANSFORMS, _HEADER, *hidden, _ABSENT, *_absences()]
    )  # fmt: skip


_PACKAGES = ("popxl", "popxl_addons")


def _absences() -> Iterator[str]:
    for reason, names in absent().items():
        yield f"\n{reason}\n\n"
        yield from (f"- `{name}`\n" for name in names)


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
