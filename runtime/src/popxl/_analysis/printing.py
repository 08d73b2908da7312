"""Text form of ops, graphs and programs, as `print(graph)` shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from popxl._analysis.tensor_names import short_name

if TYPE_CHECKING:
    from popxl._analysis.functionalization import FunctionalGraph, Node, Value
    from popxl._ir.op import Op
    from popxl.graph import Graph
    from popxl.ir import Ir
    from popxl.tensor import Tensor, TensorSpec


def format_spec(spec: TensorSpec) -> str:
    """Formats a spec: `float32[2, 3]`, with `of [4, 3]` appended for a shard."""
    text = f"{spec.dtype.name}{list(spec.shape)}"
    return f"{text} of {list(spec.meta_shape)}" if spec.meta_shape else text


def _format_tensor(t: Tensor) -> str:
    return f"%{short_name(t)}: {'&' if t._by_ref else ''}{format_spec(t.spec)}"


def _format_value(value: Any) -> str:
    from popxl.graph import Graph

    if isinstance(value, Graph):
        return f"@{value.id}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_format_value, value)) + "]"
    return str(value)


def format_op(op: Op) -> str:
    """Formats an op: `%y: float32[2, 2] = matmul(%x, %w)`, with attributes and hints."""
    lhs = ", ".join(_format_tensor(t) for t in op.outputs)
    args = ", ".join(f"%{short_name(t)}" for t in op.inputs)
    attrs = "".join(f" {k}={_format_value(v)}" for k, v in op.attrs.items() if v is not None)
    modified = f" modifies={sorted(op.site_modified)}" if op.site_modified else ""
    hints = [f"ipu={op.ipu}"] if op.ipu is not None else []
    hints += ["io"] if op.io else []
    hint = f"  # {' '.join(hints)}" if hints else ""
    return f"{lhs + ' = ' if lhs else ''}{op.name}({args}){attrs}{modified}{hint}"


def format_graph(graph: Graph) -> str:
    """Formats a graph with its inputs, variables, constants, ops and outputs."""
    from popxl.tensor import Shard, Variable

    ins = ", ".join(_format_tensor(t) for t in graph._inputs)
    outs = ", ".join(f"%{short_name(t)}" for t in graph._outputs)
    lines = [f"graph @{graph.id}({ins}) -> ({outs}) {{"]
    for t in graph._tensors.values():
        if isinstance(t, Shard):
            lines.append(f"  {_format_tensor(t)} = shard of %{short_name(t._of)}")
        elif hasattr(t, "_data"):
            kind = "variable" if isinstance(t, Variable) else "constant"
            lines.append(f"  {_format_tensor(t)} = {kind} {_format_initial_value(t)}")
    lines += [f"  {format_op(op)}" for op in graph._ops]
    return "\n".join([*lines, "}"])


def _format_initial_value(t: Any) -> str:
    from popxl.tensor import Variable

    if not isinstance(t, Variable):
        return str(t._data) if t._data.size <= 8 else "..."
    location = f" in {t._remote[0]!r} at {t._remote[1]}" if t._remote else ""
    return f"{t._grouping!r} {t._retrieval}{location}{' sharded' if t._sharded else ''}"


def format_ir(ir: Ir) -> str:
    """Formats the whole program: header, buffers, streams, graphs."""
    header = f"replicas={ir.replication_factor} host_transfers={ir.num_host_transfers}"
    lines = [f"ir {header}"]
    lines += [repr(b) for b in ir._buffers]
    lines += [repr(s) for s in ir._streams.values()]
    return "\n".join([*lines, *map(format_graph, ir._graphs)])


def first_error_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or its type if it has no message."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


# ---- the functional form ------------------------------------------------------------------------
def format_node(node: Node) -> str:
    """Formats a functional node: `%v'1 = add_(%v, %c)`, with the graphs that it runs."""
    lhs = ", ".join(map(_format_value_with_spec, node.outputs))
    args = ", ".join(map(repr, node.inputs))
    name = node.kind if node.op is None else node.op.defn.name
    if node.kind in ("view", "write"):
        name = f"{node.kind} {name}"
    runs = [
        f"@{r.graph.graph.id}" + (f" x {r.count}" if r.count != 1 else "") for r in node.regions
    ]
    values = ((k, v) for k, v in node.attrs.items() if v is not None and not runs)
    attrs = "".join(f" {k}={_format_value(v)}" for k, v in values)
    return f"{lhs + ' = ' if lhs else ''}{' '.join([name, *runs])}({args}){attrs}"


def _format_value_with_spec(value: Value) -> str:
    return f"{value!r}: {format_spec(value.spec)}"


def format_functional_graph(graph: FunctionalGraph) -> str:
    """Formats the functional form of a graph."""
    ins = ", ".join(map(_format_value_with_spec, graph.inputs))
    num_outputs = len(graph.outputs) - len(graph.changed)
    outs = ", ".join(map(repr, graph.outputs[:num_outputs]))
    pairs = zip(graph.changed, graph.outputs[num_outputs:], strict=True)
    changed = ", ".join(f"{graph.inputs[i]!r} becomes {v!r}" for i, v in pairs)
    outs = "; ".join(filter(None, (outs, changed)))
    lines = [f"functional @{graph.graph.id}({ins}) -> ({outs}) {{"]
    return "\n".join([*lines, *(f"  {format_node(node)}" for node in graph.nodes), "}"])
