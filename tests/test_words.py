"""One concept, one word: names of classes and identifiers, and how docstrings begin.

docs/glossary.md has the words. A name that a user of PyTorch, JAX or transformers would have to
look up is a fault like any other; these rules hold what was mended.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_limits import PRODUCT, ROOT, nodes_of, place

# Some scripts have two names.
SOURCES = [path for path in PRODUCT if not path.is_symlink()]

# Layers of the application stand over the add-ons' of the same name; PopXL has the others twice.
TWICE = {"Embedding", "LayerNorm", "Linear", "Module", "FpDef"}

# folder ("": all), identifiers that have another word, and that word.
NEVER = (
    ("", r"few_bits\w*|\w+_few_bits", "quant, quantized"),
    ("", r"theirs", "hf_..., source, other"),
    ("", r"lenders?|lent|borrowed|borrow", "shared_..."),
    ("", r"shown\w*|told|tells", "format_..., metrics"),
    ("", r"begun|go_on|going_on|begin_(gradients?|values?|rows?)", "initial, resume, zero_..."),
    ("", r"travels?|departing|arriving", "load, store, transfer"),
    ("modelling", r"(decoder_)?words", "input_ids"),
    ("sessions", r"(decoder_)?words", "input_ids"),
    ("data", r"(decoder_)?words", "input_ids"),
    ("modelling", r"kept|keeping|keeps\w*", "saved"),
    ("modelling", r"holders?", "shard_replicas"),
    ("modelling", r"shared_out|dealt|cuts?", "sharded"),
    ("modelling/layers", r"chosen", "topk"),
    ("planning", r"room|kept", "free_bytes, resident or saved"),
    ("checkpoints", r"parts?", "shards"),
    ("run", r"whole", "full"),
)  # fmt: skip

BEGINNINGS = ("What", "Whether", "Let", "See")


def classes() -> dict[str, list[str]]:
    found = defaultdict(list)
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(place(path, node.lineno))
    return found


def identifiers(path: Path) -> Iterator[tuple[str, int]]:
    """Names that a file defines, with their lines: functions, classes, parameters, variables."""
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr, node.lineno


def test_a_class_name_stands_for_one_class():
    twice = {name: where for name, where in classes().items() if len(where) > 1}
    assert {name: where for name, where in twice.items() if name not in TWICE} == {}


@pytest.mark.parametrize(("folder", "pattern", "word"), NEVER)
def test_a_concept_has_one_word(folder: str, pattern: str, word: str):
    found = [
        f"{place(path, line)} {name}: {word}"
        for path in SOURCES
        if path.is_relative_to(ROOT / folder)
        for name, line in identifiers(path)
        if re.fullmatch(pattern, name.strip("_"))
    ]
    assert found == []


def documents(path: Path) -> Iterator[tuple[str, int]]:
    """Docstrings of a file, and strings that stand alone as those of fields do, with lines."""
    for node in nodes_of(path):
        body = getattr(node, "body", None)  # of an expression it is no list
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield str(statement.value.value), statement.lineno


def test_docstrings_begin_with_a_noun_or_a_verb():
    found = [
        f"{place(path, line)}: {text.splitlines()[0]}"
        for path in SOURCES
        for text, line in documents(path)
        if text.split() and text.split()[0] in BEGINNINGS
    ]
    assert found == []


SECTION = r"^{}:\n((?:    .*\n|\n)+)"
ITEM = re.compile(r"    (\*{0,2}\w+(?:, \w+)*):")


def items_of(docstring: str, section: str) -> Iterator[str]:
    """Names that a section of a docstring ("Args", "Raises") describes."""
    for text in re.findall(SECTION.format(section), docstring + "\n", re.MULTILINE):
        for line in text.splitlines():
            if item := ITEM.match(line):
                yield from (name.lstrip("*") for name in item[1].split(", "))


def documented(path: Path) -> Iterator[tuple[ast.FunctionDef | ast.ClassDef, str]]:
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
            yield node, text


def parameters_of(node: ast.FunctionDef | ast.ClassDef) -> set[str] | None:
    """Parameters of a function or a constructor; None if bases or `**kwargs` may have others."""
    if isinstance(node, ast.FunctionDef):
        args = node.args
        variadic = [arg for arg in (args.vararg, args.kwarg) if arg is not None]
        named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
        return {arg.arg for arg in [*named, *variadic]}
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            return None if member.args.kwarg else parameters_of(member)
    fields = [member.target for member in node.body if isinstance(member, ast.AnnAssign)]
    return None if node.bases else {field.id for field in fields if isinstance(field, ast.Name)}


def test_docstrings_describe_parameters_that_exist():
    found = [
        f"{place(path, node.lineno)} {node.name}: {name}"
        for path in SOURCES
        for node, text in documented(path)
        if (parameters := parameters_of(node)) is not None
        for name in items_of(text, "Args")
        if name not in parameters
    ]
    assert found == []


def test_docstrings_raise_exceptions_that_exist():
    known = {*dir(builtins), *classes()}
    for path in SOURCES:
        known |= {
            (a.asname or a.name)
            for n in nodes_of(path)
            if isinstance(n, ast.ImportFrom)
            for a in n.names
        }
    found = [
        f"{place(path, node.lineno)} {node.name}: {name}"
        for path in SOURCES
        for node, text in documented(path)
        for name in items_of(text, "Raises")
        if name not in known
    ]
    assert found == []
