"""Helper functions of PopXL for programs that define ops."""

from __future__ import annotations

from typing import Any

from popxl.dtypes import dtype
from popxl.graph import Graph
from popxl.ops._args import normalize_axis
from popxl.ops._emit import check_in_graph as _check_tensors
from popxl.ops._emit import check_placement
from popxl.ops.elementwise import cast
from popxl.tensor import Tensor

__all__ = [
    "cast_if_needed",
    "check_in_graph",
    "check_tensor_ipu_and_tile_set",
    "convert_optional_dtype",
    "convert_optional_float",
    "convert_optional_int",
    "convert_optional_int64_list",
    "handle_negative_axis",
]


def cast_if_needed(t: Tensor, data_type: dtype) -> Tensor:
    """Returns `t` itself if it has the dtype, otherwise `ops.cast(t, data_type)`."""
    return t if t.dtype == data_type else cast(t, data_type)


def check_in_graph(graph: Graph, *args: Any, **tensors: Tensor) -> None:
    """Raises ValueError unless all tensors belong to `graph`."""
    _check_tensors(graph, _collect_tensors(args, tensors), "op")


def check_tensor_ipu_and_tile_set(*args: Any, **tensors: Tensor) -> None:
    """Raises ValueError if tensors are placed on different IPUs or tile sets.

    The message names two arguments by their keywords (`t1=..., t2=...`): the first whose place is
    known, and the first that differs from it.
    """
    named = {**{f"input {i}": t for i, t in enumerate(args)}, **tensors}
    check_placement({k: t for k, t in named.items() if isinstance(t, Tensor)}, "op")


def _collect_tensors(args: tuple[Any, ...], named: dict[str, Tensor]) -> list[Tensor]:
    return [t for t in (*args, *named.values()) if isinstance(t, Tensor)]


def handle_negative_axis(t: Tensor, axis: int) -> int:
    """Returns `axis` counted from the front; raises ValueError if `t` has no such axis."""
    return normalize_axis("axis", t, axis)


def convert_optional_float(v: float | None) -> float | None:
    """Returns `v` as a float; None stays None."""
    return None if v is None else float(v)


def convert_optional_int(v: int | None) -> int | None:
    """Returns `v` as an int; None stays None."""
    return None if v is None else int(v)


def convert_optional_dtype(dt: dtype | None) -> dtype | None:
    """Returns the dtype or None unchanged, for compatibility with PopXL."""
    return dt


def convert_optional_int64_list(l: list[int] | None) -> list[int] | None:
    """Returns `l` as a list of ints; None stays None."""
    return None if l is None else [int(v) for v in l]
