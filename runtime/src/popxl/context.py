"""Stacks of the program that a thread is writing: current graph, name scope, IPU and op order.

All state is one stack object per thread. The context managers of PopXL are also decorators and
may be created (not entered) with no graph active.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from types import TracebackType

    from popxl._ir.op import Op
    from popxl.graph import Graph
    from popxl.ir import Ir

Fn = TypeVar("Fn", bound=Callable[..., Any])
InSequenceKey = tuple[str, Any]


class Context(threading.local):
    """Current graph, name scopes, IPU and region label of the program that a thread is writing."""

    def __init__(self) -> None:
        self._graphs: list[Graph] = []
        self._ipus: list[int | None] = []
        self._io: list[bool] = []
        self._in_sequence: list[bool] = []
        self._parts: list[str] = []
        self._outside: list[str] = []  # name scopes of no graph, which name nothing
        self._hooks: dict[int, Callable[[Op], Any]] = {}
        self._next_hook = 0

    @property
    def graph(self) -> Graph:
        """The current graph; raises RuntimeError outside any graph."""
        if not self._graphs:
            raise RuntimeError(
                "no graph is active: write ops inside `with ir.main_graph:` or in a function "
                "passed to ir.create_graph"
            )
        return self._graphs[-1]

    @property
    def main_graph(self) -> Graph:
        return self.graph.main_graph

    @property
    def ir(self) -> Ir:
        return self.graph.ir

    @property
    def ipu_id(self) -> int | None:
        return self._ipus[-1] if self._ipus else None

    @property
    def has_no_ipu(self) -> bool:
        """True inside `with popxl.ipu(None)`, where ops get no virtual device."""
        return bool(self._ipus) and self._ipus[-1] is None

    @property
    def io_tile_set(self) -> bool:
        return bool(self._io and self._io[-1])

    @property
    def in_sequence(self) -> bool:
        return bool(self._in_sequence and self._in_sequence[-1])

    @in_sequence.setter
    def in_sequence(self, mode: bool) -> None:
        self._in_sequence[-1:] = [bool(mode)]

    @property
    def part(self) -> str:
        """Label of the program region in which ops are created now; "" if there is none."""
        return self._parts[-1] if self._parts else ""

    @property
    def name_scopes(self) -> list[str]:
        """Name scopes of the current graph, outermost first."""
        return self._graphs[-1]._scopes if self._graphs else self._outside

    def push_name_scope(self, name: str) -> None:
        self.name_scopes.append(name)

    def pop_name_scope(self) -> str:
        return self.name_scopes.pop()

    def push_graph(self, g: Graph) -> None:
        self._graphs.append(g)

    def pop_graph(self) -> Graph:
        return self._graphs.pop()

    def register_op_created_hook(self, fn: Callable[[Op], Any]) -> int:
        """Registers a hook `fn(op)`, called for each op created from now on; returns its handle."""
        self._next_hook += 1
        self._hooks[self._next_hook] = fn
        return self._next_hook

    def remove_op_created_hook(self, handle: int) -> None:
        self._hooks.pop(handle, None)

    def _call_op_created_hooks(self, op: Op) -> None:
        for fn in list(self._hooks.values()):
            fn(op)


_CONTEXT = Context()


def get_current_context() -> Context:
    return _CONTEXT


def get_current_graph() -> Graph:
    """Returns the graph to which ops are being added; raises RuntimeError outside any graph."""
    return _CONTEXT.graph


def get_main_graph() -> Graph:
    """Returns the main graph of the current Ir."""
    return _CONTEXT.main_graph


def get_ir() -> Ir:
    """Returns the Ir of the current graph."""
    return _CONTEXT.ir


gcg = get_current_graph
gmg = get_main_graph
gir = get_ir


class _StackContext(ContextDecorator):
    """Context manager that pushes a value on one of the program-writing stacks while entered."""

    def __init__(self, stack: str, value: Any) -> None:
        self._stack, self._value = stack, value

    def __enter__(self) -> None:
        getattr(_CONTEXT, self._stack).append(self._value)

    def __exit__(self, *exc: object) -> None:
        getattr(_CONTEXT, self._stack).pop()

    def _recreate_cm(self) -> _StackContext:
        return type(self)(self._stack, self._value)


def ipu(ipu: int | None) -> _StackContext:
    """Places the ops created inside on virtual device `ipu` (recorded; XLA has one per replica)."""
    return _StackContext("_ipus", ipu)


def io_tiles() -> _StackContext:
    """Places the ops created inside on IO tiles (recorded; a scheduling hint)."""
    return _StackContext("_io", True)


def in_sequence(mode: bool | Literal["pass"] = True) -> _StackContext:
    """Keeps the ops created inside in program order.

    Program order is execution order in this runtime, so the mode is recorded only.

    Raises:
        TypeError: `mode` is None.
    """
    if mode is None:
        raise TypeError("in_sequence takes True, False or 'pass', not None")
    return _StackContext("_in_sequence", _CONTEXT.in_sequence if mode == "pass" else bool(mode))


def part(label: str) -> _StackContext:
    """Labels the ops created inside as region `label` of the program in plans (see `popxl.plan`).

    Ops of graphs that are created outside count as the part from which the graph is called.
    """
    return _StackContext("_parts", label)


class name_scope(ContextDecorator):  # noqa: N801 - PopXL's name
    """Prefixes the names of the tensors created inside with `name/`; scopes nest."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        _CONTEXT.push_name_scope(self._name)

    def __exit__(self, *exc: object) -> None:
        _CONTEXT.pop_name_scope()

    def _recreate_cm(self) -> name_scope:
        return name_scope(self._name)


@contextmanager
def debug_context_frame_offset(i: int) -> Iterator[None]:
    """Does nothing; kept for compatibility, since source locations skip library frames anyway."""
    yield


def op_debug_context(name: Any) -> Any:
    """Returns the function unchanged; kept for compatibility, since `emit` records locations."""
    if callable(name):
        return name
    return lambda fn: fn


# By folder, not by name: a user's own folder may be called popxl as well.
_PACKAGE = os.path.dirname(__file__)
_NAMED = re.compile(r"\w+(: | at |\()")  # a message that begins with a function's name
_LIBRARY = (_PACKAGE + os.sep, _PACKAGE + "_addons" + os.sep, contextlib.__file__)


def add_location(error: Exception, trace: TracebackType) -> None:
    """Adds the called function and the calling line to the message of a library error."""
    at, function, is_ours = "", "", False
    for frame, line in traceback.walk_tb(trace):
        code = frame.f_code
        is_ours = code.co_filename.startswith(_LIBRARY)
        if not is_ours:
            at, function = f"{code.co_filename}:{line}", ""
        elif not function and code.co_filename != contextlib.__file__:
            function = _public_name(code.co_qualname)
    if is_ours and len(error.args) == 1 and isinstance(error.args[0], str):
        text = error.args[0]
        text = text if not function or _NAMED.match(text) else f"{function}: {text}"
        error.args = (text if at in text else f"{text} ({at})",)


def _public_name(qualname: str) -> str:
    """Returns the name by which users call a library function; "" if it is private."""
    name = qualname.removesuffix(".__init__").rpartition(".")[2]
    return "" if name.startswith("_") or "<" in qualname else name


def get_source_location(offset: int = 0) -> str:
    """Returns `file:line` of the innermost frame outside this library.

    `offset` frames further out.
    """
    import sys

    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_LIBRARY):
            if offset == 0:
                return f"{path}:{frame.f_lineno}"
            offset -= 1
        if frame.f_back is None:
            break
        frame = frame.f_back
    summary = traceback.extract_stack(limit=1)[0]
    return f"{summary.filename}:{summary.lineno}"
