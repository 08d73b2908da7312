"""Operators and methods of tensors that stand for ops.

Ops are a layer above tensors: `popxl.ops` attaches itself here when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from popxl.tensor import Tensor

ops: Any = None  # the module popxl.ops
_getitem: Any = None


def attach(module: ModuleType, getitem: Callable[[Tensor, Any], Tensor]) -> None:
    """Say which ops the operators stand for, and what `tensor[key]` does."""
    global ops, _getitem
    ops, _getitem = module, getitem


_Method = Callable[["Operators", Any], "Tensor"]


def _both(name: str) -> tuple[_Method, _Method]:
    """The operator of an op, and its reflection."""

    def operator(self: Operators, other: Any) -> Tensor:
        return getattr(ops, name)(self, self._ensure_tensor(other))

    def reflected(self: Operators, other: Any) -> Tensor:
        return getattr(ops, name)(self._ensure_tensor(other), self)

    return operator, reflected


class Operators:
    """A tensor as far as it is written with operators."""

    def _ensure_tensor(self, other: Any) -> Tensor:
        """`other` itself, or a constant of this tensor's dtype."""
        raise NotImplementedError

    # ---- shape methods --------------------------------------------------------------------------
    def transpose(self, permutation: Iterable[int] | None = None) -> Tensor:
        """Permute the axes; default: reverse them."""
        return ops.transpose(self, _tuple_or_none(permutation))

    def transpose_(self, permutation: Iterable[int] | None = None) -> Tensor:
        """As `transpose`, as a view."""
        return ops.transpose_(self, _tuple_or_none(permutation))

    @property
    def T(self) -> Tensor:  # noqa: N802 - as in numpy
        return self.transpose()

    @property
    def T_(self) -> Tensor:  # noqa: N802
        return self.transpose_()

    def reshape(self, shape: Iterable[int]) -> Tensor:
        return ops.reshape(self, tuple(shape))

    def reshape_(self, shape: Iterable[int]) -> Tensor:
        return ops.reshape_(self, tuple(shape))

    def flatten(self) -> Tensor:
        return ops.flatten(self)

    def flatten_(self) -> Tensor:
        return ops.flatten_(self)

    def detach(self) -> Tensor:
        return ops.detach(self)

    def detach_(self) -> Tensor:
        return ops.detach_(self)

    # ---- operators ------------------------------------------------------------------------------
    __add__, __radd__ = _both("add")
    __sub__, __rsub__ = _both("sub")
    __mul__, __rmul__ = _both("mul")
    __truediv__, __rtruediv__ = _both("div")
    __pow__, __rpow__ = _both("pow")
    __mod__, __rmod__ = _both("fmod")
    __matmul__, __rmatmul__ = _both("matmul")
    __and__, __rand__ = _both("logical_and")
    __or__, __ror__ = _both("logical_or")

    def __iadd__(self, other: Any) -> Tensor:
        """In place: this tensor's value changes."""
        return ops.add_(self, self._ensure_tensor(other))

    def __invert__(self) -> Tensor:
        return ops.logical_not(self)

    def __neg__(self) -> Tensor:
        return ops.negate(self)

    def __getitem__(self, key: Any) -> Tensor:
        """Integers and slices slice; an integer tensor or array gathers along axis 0; a bool
        mask of this tensor's shape keeps the chosen elements and sets the others to 0."""
        return _getitem(self, key)


def _tuple_or_none(value: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)
