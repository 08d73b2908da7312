"""FLOP counts of a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import popxl

__all__ = [
    "evaluate_FLOPs",
    "evaluate_ir_FLOPs",
    "format_flops_scientific",
    "print_FLOPs",
    "total_FLOPs",
]

TOTAL = "TOT"
_KINDS = {
    "matmul": "MatMul",
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "group_norm": "GroupNormalization",
    "layer_norm": "GroupNormalization",
}
_EXPONENTS = {"K": 3, "M": 6, "G": 9, "T": 12}


def matmul_flops(op: Any) -> int:
    """FLOPs of a matmul: 2 * rows * columns * inner size."""
    return 2 * op.outputs[0].nelms * op.inputs[0].shape[-1]


def elementwise_binary_flops(op: Any) -> int:
    """FLOPs of a binary elementwise op: 1 per element of its output."""
    return op.outputs[0].nelms


def group_norm_flops(op: Any) -> int:
    """FLOPs of a group norm: 8 per element."""
    return 8 * op.inputs[0].nelms


FLOPS_FNS = {"MatMul": matmul_flops, "GroupNormalization": group_norm_flops}


def evaluate_FLOPs(graph: popxl.Graph) -> dict[str, Any]:  # noqa: N802 - PopXL's name
    """Count the FLOPs of one run of `graph`, by kind of op.

    Returns:
        For each kind of op ("MatMul", "Add", "Sub", "Mul", "Div", "GroupNormalization"; others
        count nothing) a dict from the op's number in the graph to its operations; and their sum as
        "TOT". Under the kinds of a called graph stands such a dict by the calling op, `call_3`,
        with the operations of all its runs; of a conditional's branches the dearer counts.
    """
    flops_by_kind: dict[str, Any] = {}
    total = 0
    for number, op in enumerate(graph.ops):
        name = op.defn.name
        inner = [evaluate_FLOPs(g) for g in op.called_graphs()]
        if inner:
            dearest = max(inner, key=lambda flops: flops[TOTAL])
            runs = _scale_flops(dearest, op.attrs.get("count", 1))
            total += runs.pop(TOTAL)
            for kind, flops in runs.items():
                flops_by_kind.setdefault(kind, {})[f"{name}_{number}"] = flops
        elif name in _KINDS:
            kind = _KINDS[name]
            flops = FLOPS_FNS.get(kind, elementwise_binary_flops)(op)
            flops_by_kind.setdefault(kind, {})[number] = flops
            total += flops
    return {**flops_by_kind, TOTAL: total}


def _scale_flops(flops: Any, count: int) -> Any:
    if isinstance(flops, dict):
        return {key: _scale_flops(value, count) for key, value in flops.items()}
    return flops * count


def evaluate_ir_FLOPs(ir: popxl.Ir) -> dict[str, Any]:  # noqa: N802
    """Count the FLOPs of one run of a program on all replicas, as `evaluate_FLOPs`."""
    return _scale_flops(evaluate_FLOPs(ir.main_graph), ir.replication_factor)


def total_FLOPs(ir: popxl.Ir) -> int:  # noqa: N802
    """Count the FLOPs of one run of a program on all replicas; returns the sum over all ops."""
    return evaluate_ir_FLOPs(ir)[TOTAL]


def _sum_flops(flops: Any) -> int:
    return sum(map(_sum_flops, flops.values())) if isinstance(flops, Mapping) else flops


def print_FLOPs(  # noqa: N802
    flops_breakdown: Mapping[str, Any],
    mode: Literal["type", "flat"] = "type",
    numerical_format: Literal["K", "M", "G", "T", "nearest3"] = "nearest3",
) -> None:
    """Print the FLOP counts that `evaluate_FLOPs` returns.

    Args:
        mode: "type": sums by kind of op, the largest first; "flat": each op.
        numerical_format: see `format_flops_scientific`.
    """
    kinds = {kind: flops for kind, flops in flops_breakdown.items() if kind != TOTAL}
    if mode == "type":
        items = sorted(((k, _sum_flops(v)) for k, v in kinds.items()), key=lambda item: -item[1])
    else:
        items = [
            (f"{k} {n}", _sum_flops(v)) for k, flops in kinds.items() for n, v in flops.items()
        ]
    for name, flops in [*items, (TOTAL, flops_breakdown[TOTAL])]:
        print(f"{name}: {format_flops_scientific(flops, numerical_format)}")


def format_flops_scientific(
    val: float, format: Literal["K", "M", "G", "T", "nearest3"] = "nearest3"
) -> str:
    """Format a number with three decimals and an exponent: "9.072E+03".

    Args:
        format: K, M, G and T stand for the exponents 3, 6, 9 and 12; "nearest3" for the multiple of
            three that is nearest to the number's own: 500000 is "0.500E+06".

    Raises:
        ValueError: another format.
    """
    if format == "nearest3":
        own = int(f"{val:E}".partition("E")[2])
        exponent = 3 * round(own / 3)
    elif format in _EXPONENTS:
        exponent = _EXPONENTS[format]
    else:
        raise ValueError(f"unknown format {format!r}: use K, M, G, T or nearest3")
    return f"{val / 10**exponent:.3f}E{exponent:+03d}"
