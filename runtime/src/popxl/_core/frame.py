"""Values of the tensors of one activation of a graph, whatever a value is: arrays, shapes.

Views own nothing: reading one computes it from its owners, writing one writes through to them, so
program order decides what is seen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from popxl._core.aliases import Stored, stored_in, viewed

if TYPE_CHECKING:
    from popxl._core.op import Op
    from popxl.tensor import Tensor

V = TypeVar("V")


class ValueFrame(ABC, Generic[V]):
    """What owners hold now, and how views of them are read and written.

    Attributes:
        values: of tensors that own their storage, where the activation has given them one.
    """

    def __init__(self) -> None:
        self.values: dict[Tensor, V] = {}
        self._stored: Stored = {}

    @abstractmethod
    def outer(self, t: Tensor) -> V:
        """The value of an owner that the activation has given none: a variable or constant."""

    @abstractmethod
    def view(self, op: Op, inputs: Sequence[V]) -> V:
        """What the view that `op` makes shows of its inputs."""

    @abstractmethod
    def write_through(self, op: Op, inputs: Sequence[V], value: V) -> Sequence[V]:
        """The inputs of `op` after `value` was written to the view that it makes."""

    def read(self, t: Tensor) -> V:
        """The value of `t` now."""
        t = stored_in(t, self._stored)
        up = viewed(t)
        if not up:
            return self.values[t] if t in self.values else self.outer(t)
        assert t._producer is not None
        return self.view(t._producer, [self.read(p) for p in up])

    def write(self, t: Tensor, value: V) -> None:
        """Overwrite `t`; views write through to their owners."""
        self._write(t, value)

    def _write(self, t: Tensor, value: V) -> None:
        t = stored_in(t, self._stored)
        up = viewed(t)
        if not up:
            self.values[t] = value
            return
        assert t._producer is not None
        updated = self.write_through(t._producer, [self.read(p) for p in up], value)
        for parent, new in zip(up, updated, strict=True):
            self._write(parent, new)

    def define(self, op: Op, results: Sequence[V]) -> None:
        """Store the results of `op`: into the overwritten input, or as the outputs' values."""
        first = 0
        if op.inplace is not None:
            self.write(op.inputs[op.inplace], results[0])
            first = 1
        self.values.update(zip(op.outputs[first:], results[first:], strict=True))
