"""Python operators and methods of tensors, which call ops.

Ops are a layer above tensors: `popxl.ops` is looked up when an operator is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, Generic, TypeVar

TensorT = TypeVar("TensorT")  # the class of tensors


class _Ops:
    """The functions of `popxl.ops`, which a module of this layer cannot import."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("popxl.ops"), name)


ops = _Ops()


def _operator_method(name: str) -> Callable[[TensorOperators[TensorT], Any], TensorT]:
    """Returns a method of `TensorOperators` that calls the op `name`."""
    return lambda self, other: getattr(ops, name)(self, self._ensure_tensor(other))


def _reflected_operator_method(name: str) -> Callable[[TensorOperators[TensorT], Any], TensorT]:
    """Returns a method of `TensorOperators` that calls the op `name` with swapped operands."""
    return lambda self, other: getattr(ops, name)(self._ensure_tensor(other), self)


class TensorOperators(Generic[TensorT]):
    """Mixin with the Python operators and op methods of a tensor."""

    def _ensure_tensor(self, other: Any) -> TensorT:
        """Returns `other` if it is a tensor, else a constant of this tensor's dtype."""
        raise NotImplementedError

    # ---- shape methods --------------------------------------------------------------------------
    def transpose(self, permutation: Iterable[int] | None = None) -> TensorT:
        """Returns the tensor with permuted axes; default: in reverse order."""
        return ops.transpose(self, _tuple_or_none(permutation))

    def transpose_(self, permutation: Iterable[int] | None = None) -> TensorT:
        """Returns the tensor with permuted axes as a view, like `transpose`."""
        return ops.transpose_(self, _tuple_or_none(permutation))

    @property
    def T(self) -> TensorT:  # noqa: N802 - as in numpy
        return self.transpose()

    @property
    def T_(self) -> TensorT:  # noqa: N802
        return self.transpose_()

    def reshape(self, shape: Iterable[int]) -> TensorT:
        return ops.reshape(self, tuple(shape))

    def reshape_(self, shape: Iterable[int]) -> TensorT:
        return ops.reshape_(self, tuple(shape))

    def flatten(self) -> TensorT:
        return ops.flatten(self)

    def flatten_(self) -> TensorT:
        return ops.flatten_(self)

    def detach(self) -> TensorT:
        return ops.detach(self)

    def detach_(self) -> TensorT:
        return ops.detach_(self)

    # ---- operators ------------------------------------------------------------------------------
    __add__ = _operator_method("add")
    __radd__ = _reflected_operator_method("add")
    __sub__ = _operator_method("sub")
    __rsub__ = _reflected_operator_method("sub")
    __mul__ = _operator_method("mul")
    __rmul__ = _reflected_operator_method("mul")
    __truediv__ = _operator_method("div")
    __rtruediv__ = _reflected_operator_method("div")
    __pow__ = _operator_method("pow")
    __rpow__ = _reflected_operator_method("pow")
    __mod__ = _operator_method("fmod")
    __rmod__ = _reflected_operator_method("fmod")
    __matmul__ = _operator_method("matmul")
    __rmatmul__ = _reflected_operator_method("matmul")
    __and__ = _operator_method("logical_and")
    __rand__ = _reflected_operator_method("logical_and")
    __or__ = _operator_method("logical_or")
    __ror__ = _reflected_operator_method("logical_or")

    def __iadd__(self, other: Any) -> TensorT:
        """Adds `other` in place, which changes this tensor's value."""
        return ops.add_(self, self._ensure_tensor(other))

    def __invert__(self) -> TensorT:
        return ops.logical_not(self)

    def __neg__(self) -> TensorT:
        return ops.negate(self)

    def __getitem__(self, key: Any) -> TensorT:
        """Slices, gathers or masks by a Python index.

        Integers and slices slice; an integer tensor gathers along axis 0; a bool mask of the same
        shape zeroes the other elements.
        """
        return import_module("popxl.ops._getitem").getitem(self, key)


def _tuple_or_none(value: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)
