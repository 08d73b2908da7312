"""Factories of op functions whose arguments are all tensors.

exp = unary(define("exp", floats(jnp.exp), grad=..., tags=ELEMENTWISE), "e to the power ...")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from popxl.ops._emit import emit

if TYPE_CHECKING:
    from popxl._ir.op_registry import OpDef
    from popxl.tensor import Tensor

ELEMENTWISE = ("elementwise",)

_Function = TypeVar("_Function", bound=Callable[..., Any])


class UnaryOp(Protocol):
    """A public op function of one tensor."""

    def __call__(self, t: Tensor) -> Tensor: ...


class BinaryOp(Protocol):
    """A public op function of two tensors."""

    def __call__(self, lhs: Tensor, rhs: Tensor) -> Tensor: ...


def unary_op(defn: OpDef, doc: str, inplace: int | None = None) -> UnaryOp:
    """Returns a function that adds an op of one tensor, with docstring `doc`."""

    def op(t: Tensor) -> Tensor:
        return emit(defn, [t], inplace=inplace)[0]

    return publish_op_function(defn, op, doc, inplace)


def binary_op(defn: OpDef, doc: str, inplace: int | None = None) -> BinaryOp:
    """Returns a function that adds an op of two tensors, with docstring `doc`."""

    def op(lhs: Tensor, rhs: Tensor) -> Tensor:
        return emit(defn, [lhs, rhs], inplace=inplace)[0]

    return publish_op_function(defn, op, doc, inplace)


def publish_op_function(
    defn: OpDef, op: _Function, doc: str, inplace: int | None = None
) -> _Function:
    """Names and documents `op` as a public function of the module that defines it."""
    op.__name__ = op.__qualname__ = defn.name + ("" if inplace is None else "_")
    op.__module__, op.__doc__ = defn.home, doc
    op.defn = defn  # type: ignore[attr-defined]
    return op
