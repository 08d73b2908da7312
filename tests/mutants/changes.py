"""Small faults that can be made in a Python source: one change of its text each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

FLIPPED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.And: "or",
    ast.Or: "and",
}
# Calls that only tell a person something.
TELLING = {"print", "warn", "debug", "info", "warning", "error", "exception", "log", "add_argument"}


@dataclass(frozen=True)
class Change:
    line: int
    start: int  # bytes of the source, from here
    end: int  # to here
    new: str
    kind: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


def changes(source: bytes) -> list[Change]:
    """All changes of a source, by their place. None in docstrings, annotations and messages."""
    found = _Finder(source)
    found.visit(ast.parse(source))
    return sorted(found.changes, key=lambda change: (change.start, change.end, change.kind))


class _Finder(ast.NodeVisitor):
    def __init__(self, source: bytes):
        self.source, self.changes = source, []
        lengths = [len(line) for line in source.splitlines(keepends=True)]
        self.starts = [sum(lengths[:i]) for i in range(len(lengths))]

    # ---- what is left alone ----
    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._all([*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._all(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._all([node.value] if node.value else [])

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        return

    visit_Raise = visit_Import = visit_ImportFrom = visit_JoinedStr

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # which only guards against faults
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if _name(node.func) not in TELLING:
            self.generic_visit(node)

    # ---- what is changed ----
    def visit_Compare(self, node: ast.Compare) -> None:
        self._operator(node.left, node.ops[0], node.comparators[0], "comparison")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._operator(node.values[0], node.op, node.values[1], "boolean")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = [x for x in ast.walk(node) if isinstance(x, ast.JoinedStr) or _is(x, str)]
        if not texts:
            self._operator(node.left, node.op, node.right, "arithmetic")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            kind = "negation dropped" if isinstance(node.op, ast.Not) else "minus dropped"
            self._replace(node, f"({self._text(node.operand)})", kind)
        self.visit(node.operand)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value), "constant")
        elif isinstance(node.value, int):
            self._replace(node, str(node.value + 1), "constant")
        elif isinstance(node.value, float):
            self._replace(node, repr(node.value * 2 or 1.0), "constant")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value and not _is(node.value, type(None)):
            self._replace(node.value, "None", "returned value")
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if _name(node.test) != "TYPE_CHECKING":
            if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
                self._replace(node.test, f"not ({self._text(node.test)})", "condition")
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and _name(node.value.func) not in TELLING:
            self._replace(node, "pass", "statement dropped")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.targets[0], ast.Attribute | ast.Subscript):
            self._replace(node, "pass", "statement dropped")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass", "statement dropped")
        self.visit(node.value)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "break", "continue")

    # ---- places ----
    def _all(self, nodes: list) -> None:
        for node in nodes:
            self.visit(node)

    def _at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()

    def _span(self, node) -> tuple[int, int]:
        start = self._at(node.lineno, node.col_offset)
        return start, self._at(node.end_lineno, node.end_col_offset)

    def _replace(self, node, new: str, kind: str) -> None:
        self.changes.append(Change(node.lineno, *self._span(node), new, kind))

    def _operator(self, left, op: ast.AST, right, kind: str) -> None:
        """Parentheses may stand between an operand and its operator."""
        start, end = self._span(left)[1], self._span(right)[0]
        between = self.source[start:end].decode()
        for old in _spellings(op) if type(op) in FLIPPED else ():
            if "#" not in between and (at := between.find(old)) >= 0:
                span = (start + at, start + at + len(old))
                line = left.end_lineno + between[:at].count("\n")
                self.changes.append(Change(line, *span, FLIPPED[type(op)], kind))
                return


def _spellings(op: ast.AST) -> Iterator[str]:
    """How an operator is written: what `ast` writes for it."""
    name = ast.Name("x")
    if isinstance(op, ast.cmpop):
        node: ast.expr = ast.Compare(name, [op], [name])
    elif isinstance(op, ast.boolop):
        node = ast.BoolOp(op, [name, name])
    else:
        node = ast.BinOp(name, op, name)
    yield ast.unparse(node)[2:-2]


def _name(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _is(node: ast.AST, kind: type) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, kind)
