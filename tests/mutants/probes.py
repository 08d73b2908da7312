"""Which tests run a line: a call in front of each statement that is to be changed.

Where a test passes a probe it says so (`reached.py`). Unlike tracing this costs next to nothing,
so that finding out takes no longer than the tests themselves.
"""

from __future__ import annotations

import ast
from typing import TypeGuard

CALL = '__import__("mutants_reached").at({})'
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def with_probes(source: bytes, probes: dict[int, list[int]]) -> bytes:
    """The source with calls in it, each on a line of its own.

    Args:
        probes: lines that are to be changed, by the number of their probe.
    """
    text = source.decode()
    lines, tree = text.splitlines(keepends=True), ast.parse(text)
    calls: dict[int, list[int]] = {}
    for probe, changed in probes.items():
        for line in changed:
            for place in _places(tree, lines, line):
                calls.setdefault(place, []).append(probe)
    for place in sorted(calls, reverse=True):
        indent = lines[place - 1][: len(lines[place - 1]) - len(lines[place - 1].lstrip())]
        lines[place - 1 : place - 1] = [
            f"{indent}{CALL.format(probe)}\n" for probe in sorted(set(calls[place]))
        ]
    return "".join(lines).encode()


def _places(tree: ast.Module, lines: list[str], line: int) -> list[int]:
    """In front of the innermost statement of a function that has the line; for its signature, of
    its first one; for a line outside of functions, which importing runs, of the first ones of all.
    """
    functions = [node for node in ast.walk(tree) if _has_room(node, lines)]  # outer ones first
    around = [f for f in functions if _start(f) <= line <= (f.end_lineno or 0)]
    if not around:
        return sorted({_first(function) for function in functions})
    inside = [
        _start(node)
        for node in ast.walk(around[-1])
        if isinstance(node, ast.stmt) and node is not around[-1] and not _is_text(node)
        if _start(node) <= line <= (node.end_lineno or 0) and _begins_line(node, lines)
    ]
    return [max(inside, default=_first(around[-1]))]


def _has_room(node: ast.AST, lines: list[str]) -> TypeGuard[_Function]:
    """A function with more than a text, whose body has lines of its own."""
    if not isinstance(node, _Function):
        return False
    return not all(map(_is_text, node.body)) and _begins_line(node.body[0], lines)


def _first(function: _Function) -> int:
    return _start(next(node for node in function.body if not _is_text(node)))


def _start(node: ast.stmt) -> int:
    """Decorators belong to what they decorate."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def _is_text(node: ast.stmt) -> bool:
    """A docstring, or dots."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _begins_line(node: ast.stmt, lines: list[str]) -> bool:
    """Not so what follows a colon or a semicolon, and `elif`, which is an `if` in an `else`."""
    text = lines[node.lineno - 1].encode()
    return not text[: node.col_offset].strip() and not text[node.col_offset :].startswith(b"elif")
