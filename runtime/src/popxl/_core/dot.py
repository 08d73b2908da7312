"""DOT files of the graphs of an Ir, for `ir.dot_checkpoint`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from popxl._core.options import SessionOptions
    from popxl.graph import Graph
    from popxl.ir import Ir


def graph_dot(graph: Graph) -> str:
    """A graph in the DOT language: ops are boxes, tensors are the arrows between them."""
    lines = ["digraph {", "  node [shape=box];"]
    names = {op: f"op{i}" for i, op in enumerate(graph._ops)}
    for op, node in names.items():
        lines.append(f'  {node} [label="{op.name}"];')
        for t in op.inputs:
            source = names.get(t._producer, f'"{t.name}"') if t._producer else f'"{t.name}"'
            label = f"{t.name} {t.dtype.name}{list(t.shape)}"
            lines.append(f'  {source} -> {node} [label="{label}"];')
    lines += [f'  {names[t._producer]} -> "{t.name}";' for t in graph._outputs if t._producer]
    return "\n".join([*lines, "}"])


def _checks(options: SessionOptions) -> list[str]:
    """Names in the option `dotChecks` and, separated by colons, in POPART_DOT_CHECKS.

    PopART writes a picture at each stage of its compiler that is named, and at all for ALL. Here a
    program has one form, its final one.
    """
    from_environment = filter(None, os.environ.get("POPART_DOT_CHECKS", "").split(":"))
    names = [*options.dotChecks, *from_environment]
    return list(dict.fromkeys("final" if name.upper() == "ALL" else name for name in names))


def write_requested(ir: Ir) -> None:
    """Write the files that `ir.dot_checkpoint`, session options or the environment ask for."""
    options = ir._pb_ir.getSessionOptions()
    requested = [*ir._pb_ir.dot_checkpoints, *((c, None) for c in _checks(options))]
    for check, folder in requested:
        target = Path(folder if folder is not None else options.logDir or ".")
        target.mkdir(parents=True, exist_ok=True)
        for graph in ir._graphs:
            name = "".join(c if c.isalnum() or c in "._-" else "_" for c in graph.id)
            (target / f"{check.lower()}_{name}.dot").write_text(graph_dot(graph), encoding="utf-8")
