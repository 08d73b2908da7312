"""How many floating-point operations a program does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal

import popxl

__all__ = [
    "evaluate_FLOPs",
    "evaluate_ir_FLOPs",
    "format_flops_scientific",
    "print_FLOPs",
    "total_FLOPs",
]


def matmul_flops(op: Any) -> int:
    """A multiplication and an addition for each term of each element."""
    return 2 * op.outputs[0].nelms * op.inputs[0].shape[-1]


def elementwise_binary_flops(op: Any) -> int:
    """One for each element of the result."""
    return op.outputs[0].nelms


def group_norm_flops(op: Any) -> int:
    """Mean, variance, normalisation, scale and shift: 8 for each element."""
    return 8 * op.inputs[0].nelms


FLOPS_FNS: Mapping[str, Callable[[Any], int]] = {
    "matmul": matmul_flops,
    "layer_norm": group_norm_flops,
    "group_norm": group_norm_flops,
}


def _op_flops(op: Any) -> int:
    name = op.defn.name
    if op.defn.flops is not None:
        return op.defn.flops(op)
    if name in FLOPS_FNS:
        return FLOPS_FNS[name](op)
    if name == "vjp":  # the gradient of a pure op costs about what the op does, for each input
        return sum(t.nelms for t in op.outputs)
    return elementwise_binary_flops(op) if "elementwise" in op.defn.tags else 0


def evaluate_FLOPs(graph: popxl.Graph) -> dict[str, int]:  # noqa: N802 - PopXL's name
    """Operations of one run of `graph`, by op: `graph/0.matmul`. Ops that do none are left out.

    Called graphs count under the op that calls them, as often as it runs them; of a conditional's
    branches the dearer counts.
    """
    found: dict[str, int] = {}
    for i, op in enumerate(graph.ops):
        here = f"{graph.id}/{i}.{op.defn.name}"
        inner = [evaluate_FLOPs(g) for g in op.called_graphs()]
        if inner:
            dearest = max(inner, key=lambda flops: sum(flops.values()))
            times = op.attrs.get("count", 1)
            found.update({f"{here}/{k}": v * times for k, v in dearest.items()})
        elif flops := _op_flops(op):
            found[here] = flops
    return found


def evaluate_ir_FLOPs(ir: popxl.Ir) -> dict[str, int]:  # noqa: N802
    """Operations of one run of the main graph, on one replica, by op."""
    return evaluate_FLOPs(ir.main_graph)


def total_FLOPs(ir: popxl.Ir) -> int:  # noqa: N802
    """Operations of one run of the main graph, on one replica."""
    return sum(evaluate_ir_FLOPs(ir).values())


def print_FLOPs(  # noqa: N802
    flops_breakdown: Mapping[str, int],
    mode: Literal["type", "flat"] = "type",
    numerical_format: Literal["K", "M", "G", "T", "nearest3"] = "nearest3",
) -> None:
    """Print what `evaluate_FLOPs` returns.

    Args:
        mode: "type": sums by kind of op, the largest first; "flat": each op.
        numerical_format: see `format_flops_scientific`.
    """
    totals: dict[str, int] = defaultdict(int)
    for key, flops in flops_breakdown.items():
        totals[key.rpartition(".")[2] if mode == "type" else key] += flops
    items = list(totals.items())
    if mode == "type":
        items.sort(key=lambda item: -item[1])
    for name, flops in [*items, ("total", sum(flops_breakdown.values()))]:
        print(f"{name}: {format_flops_scientific(flops, numerical_format)}")


def format_flops_scientific(
    val: float, format: Literal["K", "M", "G", "T", "nearest3"] = "nearest3"
) -> str:
    """`val` in thousands (K), millions (M), ... or in the largest of them that it reaches."""
    units = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    unit: str = format
    if format == "nearest3":
        unit = max((u for u in units if val >= units[u]), key=units.__getitem__, default="")
    if unit not in units:
        raise ValueError(f"unknown format {format!r}: use K, M, G, T or nearest3")
    return f"{val / units[unit]:.3f} {unit}FLOPs"
