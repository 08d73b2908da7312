"""DOT (Graphviz) files of a program, for `ir.dot_checkpoint` and sessions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from popxl._compat.session_options import requested_dot_checkpoints

if TYPE_CHECKING:
    from popxl.graph import Graph
    from popxl.ir import Ir


def ir_to_dot(ir: Ir) -> str:
    """Returns a program in DOT: graphs are clusters, ops are nodes, tensors are edges."""
    lines = ["digraph {", "  node [shape=box];"]
    for number, graph in enumerate(ir._graphs):
        lines += [f"  subgraph cluster_{number} {{", f"    label={_quote(graph.id)};"]
        lines += [f"    {line}" for line in _graph_to_dot(graph, f"g{number}")]
        lines.append("  }")
    return "\n".join([*lines, "}"])


def _graph_to_dot(graph: Graph, prefix: str) -> list[str]:
    from popxl._analysis.tensor_names import short_name

    nodes = {op: f"{prefix}_op{i}" for i, op in enumerate(graph._ops)}
    lines = [f"{node} [label={_quote(op.name)}];" for op, node in nodes.items()]
    ends = {t: _quote(t.id) for t in graph._tensors.values() if t._producer is None}
    for op, node in nodes.items():
        for t in op.inputs:
            source = ends[t] if t._producer is None else nodes[t._producer]
            label = _quote(f"{short_name(t)} {t.dtype.name}{list(t.shape)}")
            lines.append(f"{source} -> {node} [label={label}];")
    outputs = (t for t in graph._outputs if t._producer is not None)
    return [*lines, *(f"{nodes[t._producer]} -> {_quote(t.id)};" for t in outputs)]  # type: ignore[index]


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def write_dot_checkpoint(ir: Ir, name: str) -> None:
    """Writes the program to `<name>.dot` in the folder `logDir`, if this checkpoint is enabled."""
    options = ir._pb_ir.getSessionOptions()
    if not requested_dot_checkpoints(options) & {"ALL", name.upper()}:
        return
    folder = Path(options.logDir or ".")
    folder.mkdir(parents=True, exist_ok=True)
    file = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
    (folder / f"{file}.dot").write_text(ir_to_dot(ir), encoding="utf-8")
