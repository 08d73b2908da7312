"""Writes the list of supported ops into docs/ops.md, from the op registry and the ops' source.

    python -m runtime.tools.supported_ops

Which functions make an op, and which types it takes, is read off the syntax trees of its module.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import popxl_addons.ops
import popxl_addons.optimizers.adam_8bit
import popxl_addons.optimizers.weight_residual
from popxl import ops
from popxl._ir.op_registry import NoGrad, OpDef, registry
from popxl.lazy_exports import exported_names, load_all

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"
_PART = re.compile(r"(?<=<!-- supported ops -->\n).*?(?=<!-- end -->)", re.DOTALL)
_PACKAGES = ("popxl", "popxl_addons")


# ---- syntax trees -------------------------------------------------------------------------------
@cache
def _module_ast(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _names_used(module: str, node: ast.AST, seen: set[str]) -> Iterator[str]:
    """Yields the dotted names in `node` and, recursively, in the popxl functions that it uses."""
    for name in _dotted_names(node):
        yield name
        if "." not in name and name not in seen:
            seen.add(name)
            home, body = _find_definition(module, name)
            if body is not None:
                yield from _names_used(home, body, seen)


@cache
def _find_definition(module: str, name: str) -> tuple[str, ast.AST | None]:
    """Returns the module and AST node that define the function or table called `name`."""
    for node in _module_ast(module).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return module, node.value if isinstance(node.value, ast.Dict) else None
    value = _value_of(module, name)
    home = getattr(value, "__module__", None) or ""
    if isinstance(value, FunctionType) and home.startswith("popxl") and home != module:
        return _find_definition(home, value.__name__)
    return module, None


def _value_of(module: str, name: str) -> Any:
    """Returns what a name means in a module, some of whose functions import what they use."""
    if hasattr(found := importlib.import_module(module), name):
        return getattr(found, name)
    home, name_there = _imported_names(module).get(name, (None, ""))
    return None if home is None else getattr(importlib.import_module(home), name_there, None)


@cache
def _imported_names(module: str) -> dict[str, tuple[str, str]]:
    """Returns where a module imports names from, also within functions, and what they are there."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(_module_ast(module)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, (node.module, alias.name))
    return found


@cache
def _dotted_names(node: ast.AST) -> tuple[str, ...]:
    """Returns maximal dotted names in source order, except in annotations."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        text = ast.unparse(node)
        if all(part.isidentifier() for part in text.split(".")):
            return (text,)
    names: list[str] = []
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                names += _dotted_names(child)
    return tuple(names)


def _lowering_node(defn: OpDef) -> ast.AST | None:
    """Returns the AST node of an op's lowering, an argument of `define`."""
    for node in ast.walk(_module_ast(defn.home)):
        if isinstance(node, ast.Call) and node.args[:1] and ast.unparse(node.func) == "define":
            name = node.args[0]
            if isinstance(name, ast.Constant) and name.value == defn.name and node.args[1:]:
                return node.args[1]
    # Defined in a function for several names: find the lowering by where it is written.
    assert isinstance(defn.lower, FunctionType)
    if defn.lower.__name__ != "<lambda>":
        return _find_definition(defn.lower.__module__, defn.lower.__name__)[1]
    lambdas = (n for n in ast.walk(_module_ast(defn.home)) if isinstance(n, ast.Lambda))
    return next((n for n in lambdas if n.lineno == defn.lower.__code__.co_firstlineno), None)


# ---- functions ----------------------------------------------------------------------------------
@cache
def _public_functions() -> dict[str, FunctionType]:
    """Returns the public op functions, by name as shown in docs/ops.md."""
    found: dict[str, Any] = {
        f"ops.{name}": getattr(ops, name) for name in exported_names("popxl.ops")
    }
    for part in ("collectives", "fp8", "var_updates"):
        module = getattr(ops, part)
        found.update(
            (f"ops.{part}.{name}", getattr(module, name))
            for name in exported_names(module.__name__)
        )
    for module in _import_modules(popxl_addons.ops):
        found.update(
            (f"addons.{name}", value)
            for name in getattr(module, "__all__", ())
            if getattr(value := getattr(module, name), "__module__", "") == module.__name__
        )
    return {n: f for n, f in found.items() if isinstance(f, FunctionType)}


def _import_modules(package: ModuleType) -> Iterator[ModuleType]:
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(info.name)


def _ops_of(function: FunctionType) -> tuple[list[str], list[str]]:
    """Returns the ops that a function adds itself, and the op functions that it calls."""
    if isinstance(defn := getattr(function, "defn", None), OpDef):
        return [defn.name], []
    module, node = _find_definition(function.__module__, function.__name__)
    assert node is not None, function
    public = {f.__name__ for f in _public_functions().values()}
    made, called = [], []
    for name in _names_used(module, node, {function.__name__}):
        value = _value_of(module, name)
        last = name.rpartition(".")[2]
        if isinstance(value, OpDef):
            made.append(value.name)
        if name.startswith("ops.") and last in public:
            called.append(last)
    return list(dict.fromkeys(made)), sorted(set(called))


# ---- what is said of an op ----------------------------------------------------------------------
def _accepted_dtypes(defn: OpDef) -> str:
    """Returns the dtypes that an op accepts, as shown in docs/ops.md."""
    if defn.execute is not None or defn.regions is not None:
        return "any"
    node = _lowering_node(defn)
    used = set() if node is None else set(_names_used(defn.home, node, set()))
    types = "any"
    if {"number_op", "check_arithmetic"} & used:
        types = "numbers"
    if {"float_op", "check_floating"} & used:
        types = "floats"
    return types + (", alike" if defn.dtypes == "same" else "")


def _gradient_kind(defn: OpDef) -> str:
    if isinstance(defn.grad, NoGrad):
        return "none"
    return "JAX's" if defn.grad is None else "own"


def _function_cells(defn: OpDef, functions: list[str]) -> list[str]:
    """Returns an op's functions as Markdown; with the op's name if no function has it."""
    if defn.name in {f.rpartition(".")[2].removesuffix("_") for f in functions}:
        return [f"`{name}`" for name in functions]
    return [f"{_list_text(functions)} (op `{defn.name}`)"]


def _table_rows(functions_by_op: Iterable[tuple[OpDef, list[str]]]) -> Iterator[str]:
    """Yields a table row for each kind of gradient and dtypes, with the functions of such ops."""
    by_kind: dict[tuple[str, str], list[str]] = defaultdict(list)
    for defn, functions in functions_by_op:
        by_kind[_gradient_kind(defn), _accepted_dtypes(defn)] += _function_cells(defn, functions)
    for (gradient, types), names in sorted(by_kind.items()):
        yield f"{gradient} | {types} | {', '.join(sorted(set(names)))}\n"


def _list_text(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# ---- the page -----------------------------------------------------------------------------------
def rewrite_page(text: str) -> str:
    """Returns the text of docs/ops.md with the generated list up to date."""
    return _PART.sub(lambda _: "".join(_generated_lines()), text)


def _generated_lines() -> Iterator[str]:
    by_op: dict[str, list[str]] = defaultdict(list)
    composed: list[str] = []
    refused: list[str] = []
    for name, function in sorted(_public_functions().items()):
        made, called = _ops_of(function)
        for op in made:
            by_op[op].append(name)
        if called and not made:
            composed.append(name)
        if "raise NotImplementedError" in inspect.getsource(function) and not called and not made:
            refused.append(name)
    load_all("popxl")
    load_all("popxl_addons")
    ours = {n: d for n, d in sorted(registry().items()) if d.home.partition(".")[0] in _PACKAGES}
    yield "gradient | types | functions\n---|---|---\n"
    yield from _table_rows((d, by_op[n]) for n, d in ours.items() if n in by_op)
    yield f"\nTransforms and gradients make {_list_text(n for n in ours if n not in by_op)}.\n"
    yield f"\nFunctions made of others: {_list_text(composed)}. Refused: {_list_text(refused)}.\n"
    yield "\nWhy an op has no gradient:\n\n"
    yield from _reason_lines(ours.values())


def _reason_lines(op_definitions: Iterable[OpDef]) -> Iterator[str]:
    ops_of: dict[str, list[str]] = defaultdict(list)
    for defn in op_definitions:
        if isinstance(defn.grad, NoGrad):
            ops_of[defn.grad.reason].append(defn.name)
    yield from (f"- {reason}: {_list_text(names)}\n" for reason, names in sorted(ops_of.items()))


def main() -> None:
    PAGE.write_text(rewrite_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
