"""Compares `popxl` and `popxl_addons` with the lists of PopXL's public names and parameters.

    python -m runtime.tools.compare_api

prints each difference and exits with 1 if there is one. `api/popxl.json` and
`api/popxl_addons.json` hold, for each module, its names, and for each function the parameters with
their defaults; types are not compared. `api/absent.json` lists what we leave out or write
differently, grouped by the reason.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import popxl

API = Path(__file__).parent / "api"
PACKAGES = ("popxl", "popxl_addons")
# A parameter that binds the instance has any name.
_RECEIVERS = ("self", "cls")


def signature_lists() -> dict[str, dict[str, Any]]:
    """Returns the listed names of both packages, by module."""
    return {
        module: names
        for package in PACKAGES
        for module, names in json.loads((API / f"{package}.json").read_text("utf-8")).items()
    }


def missing_names() -> dict[str, list[str]]:
    """Returns the public names whose difference from PopXL is intended, by reason.

    As `module.name` or `module.Class.member`.
    """
    listed: dict[str, list[str]] = json.loads((API / "absent.json").read_text("utf-8"))
    return listed


def signature_differences() -> dict[str, str]:
    """Returns, for each name that differs from PopXL's lists, how it differs.

    Whether or not the difference is listed.
    """
    return {
        name: how
        for module, names in signature_lists().items()
        for name, how in _module_differences(module, names)
    }


# ---- one module ---------------------------------------------------------------------------------
def _module_differences(module: str, names: dict[str, Any]) -> Iterator[tuple[str, str]]:
    try:
        ours = importlib.import_module(module)
    except ImportError:
        yield module, "missing module"
        return
    plain = (*names.get("all", ()), *names.get("imports", ()), *names.get("constants", ()))
    for name in dict.fromkeys((*plain, *names.get("functions", ()), *names.get("classes", ()))):
        if not hasattr(ours, name):
            yield f"{module}.{name}", "missing"
    for name, parameters in names.get("functions", {}).items():
        if hasattr(ours, name):
            yield from _parameter_differences(f"{module}.{name}", getattr(ours, name), parameters)
    for name, members in names.get("classes", {}).items():
        if hasattr(ours, name):
            yield from _class_differences(f"{module}.{name}", getattr(ours, name), members)


def _class_differences(path: str, ours: Any, members: dict[str, Any]) -> Iterator[tuple[str, str]]:
    known = {*dir(ours), *_instance_attributes(ours)}
    for kind in ("properties", "attributes", "methods"):
        for name in members.get(kind, ()):
            if name not in known:
                yield f"{path}.{name}", "missing"
    for name, access in members.get("properties", {}).items():
        found = inspect.getattr_static(ours, name, None)
        if access == "settable" and isinstance(found, property) and found.fset is None:
            yield f"{path}.{name}", "cannot be set"
    for name, parameters in members.get("methods", {}).items():
        if name in known:
            yield from _parameter_differences(f"{path}.{name}", getattr(ours, name), parameters)


@cache
def _instance_attributes(cls: type) -> frozenset[str]:
    """Returns the names of instance attributes: annotated, in slots, or set in methods."""
    found: set[str] = set()
    for base in cls.__mro__[:-1]:
        found.update(getattr(base, "__annotations__", ()))
        found.update(getattr(base, "__slots__", ()))
        try:
            tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        found.update(
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        )
    return frozenset(found)


# ---- parameters ---------------------------------------------------------------------------------
def _parameter_differences(path: str, ours: Any, expected: list[str]) -> Iterator[tuple[str, str]]:
    if expected and expected[0] in _RECEIVERS:
        expected = expected[1:]
    if ours is getattr(object, path.rpartition(".")[2], None):
        return  # Python's own, as `__eq__`: operators call it, by position
    try:
        found = _described_parameters(ours)
    except (TypeError, ValueError):  # no signature: not a callable we can look into
        yield path, f"has no signature, expected ({', '.join(expected)})"
        return
    if path.count(".") and found and found[0] in _RECEIVERS:
        found = found[1:]
    if found != expected:
        yield path, f"takes ({', '.join(found)}), expected ({', '.join(expected)})"


def _described_parameters(function: Any) -> list[str]:
    """Returns a function's parameters as the lists write them: `t`, `axis=0`, `*ts`, `*`."""
    found, starred = [], False
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not starred:
            found.append("*")
            starred = True
        if p.kind is p.VAR_POSITIONAL:
            found.append(f"*{p.name}")
            starred = True
        elif p.kind is p.VAR_KEYWORD:
            found.append(f"**{p.name}")
        else:
            found.append(p.name if p.default is p.empty else f"{p.name}={_default_text(p.default)}")
    return found


def _default_text(default: Any) -> str:
    if isinstance(default, (Enum, popxl.dtype)):
        return default.name
    return repr(default)


# ---- the comparison -----------------------------------------------------------------------------
def unexplained_differences() -> list[str]:
    """Returns the differences that are not listed, and listed names that do not differ."""
    found = signature_differences()
    reasons = [name for names in missing_names().values() for name in names]
    lines = [f"{name} {how}" for name, how in found.items() if name not in set(reasons)]
    lines += [f"{name} is listed, but does not differ" for name in reasons if name not in found]
    lines += [f"{name} is listed twice" for name in set(reasons) if reasons.count(name) > 1]
    return lines


def main() -> int:
    lines = unexplained_differences()
    for line in lines:
        print(line)
    names = sum(map(_number_of_names, signature_lists().values()))
    listed = sum(map(len, missing_names().values()))
    print(f"{names} names: {len(lines)} unexplained differences, {listed} listed with a reason")
    return 1 if lines else 0


def _number_of_names(module: dict[str, Any]) -> int:
    members = sum(len(kind) for members in module.get("classes", {}).values()
                  for kind in members.values())  # fmt: skip
    plain = {*module.get("all", ()), *module.get("imports", ()), *module.get("constants", ()),
             *module.get("functions", ()), *module.get("classes", ())}  # fmt: skip
    return len(plain) + members


if __name__ == "__main__":
    sys.exit(main())
