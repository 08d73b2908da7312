"""Scalar op arguments, given as a Python number or as a tensor.

A number becomes an attribute of the op. A tensor becomes a further input; the attribute `tensors`
lists, in the order of these inputs, the names of the scalars that came as tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from popxl.ops._emit import emit

if TYPE_CHECKING:
    from popxl._ir.op_registry import OpDef
    from popxl.tensor import Tensor


def with_scalars(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates an op's lowering `fn(*arrays, **scalars)` to take scalars as numbers or tensors."""

    def lower(*arrays: Any, tensors: tuple[str, ...] = (), **values: Any) -> Any:
        count = len(arrays) - len(tensors)
        given = zip(tensors, arrays[count:], strict=True)
        return fn(*arrays[:count], **values, **{name: _as_scalar(x, name) for name, x in given})

    return lower


def _as_scalar(x: Any, name: str) -> Any:
    if x.dtype == bool or (x.dtype.itemsize == 1 and x.dtype.kind not in "iu"):
        raise TypeError(f"{name} is a number, not {x.dtype}: use ops.cast")
    if x.size != 1:
        raise ValueError(f"{name} must be a scalar, but has shape {x.shape}")
    return x.reshape(())


def emit_with_scalars(
    defn: OpDef,
    inputs: Iterable[Tensor],
    scalars: Mapping[str, float | Tensor | None],
    attrs: Mapping[str, Any] | None = None,
    inplace: int | None = None,
) -> tuple[Tensor, ...]:
    """Adds an op with a `with_scalars` lowering to the graph; leaves scalars out that are None."""
    from popxl.tensor import Tensor

    tensors = {k: v for k, v in scalars.items() if isinstance(v, Tensor)}
    scalars_in = {
        k: float(v) for k, v in scalars.items() if v is not None and not isinstance(v, Tensor)
    }
    merged: dict[str, Any] = {**(attrs or {}), **scalars_in}
    if tensors:
        merged["tensors"] = tuple(tensors)
    return emit(defn, [*inputs, *tensors.values()], merged, inplace=inplace)
