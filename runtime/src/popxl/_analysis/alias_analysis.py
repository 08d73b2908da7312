"""Alias analysis: which tensors share storage through in-place ops and views.

Chains of in-place ops and of views can be long, so nothing here recurses along them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import jax
import numpy as np

if TYPE_CHECKING:
    from popxl._ir.op import Op
    from popxl.tensor import Tensor


class AliasAnalysis:
    """Alias analysis: for each view or in-place result, the tensors that own its memory.

    Attributes:
        replacements: for some views, an op that does the same as theirs.
    """

    def __init__(self) -> None:
        self.replacements: dict[Tensor, Op] = {}
        self._roots: dict[Tensor, Tensor] = {}

    def inplace_root(self, t: Tensor) -> Tensor:
        """Returns the tensor that the chain of in-place ops ending in `t` started from."""
        visited = []
        while t not in self._roots:
            op = t._producer
            if op is None or op.inplace is None or op.outputs[0] is not t:
                self._roots[t] = t
                break
            visited.append(t)
            t = op.inputs[op.inplace]
        self._roots.update(dict.fromkeys(visited, self._roots[t]))
        return self._roots[t]

    # ---- of tensors that are no results in place ------------------------------------------------
    def view_op(self, t: Tensor) -> Op | None:
        """Returns the op that makes `t` a view of other tensors; None if `t` owns its storage."""
        op = self.replacements.get(t, t._producer)
        return op if op is not None and op.view else None

    def view_parents(self, t: Tensor) -> list[Tensor]:
        """Returns the tensors that `t` is a direct view of; empty if `t` owns its storage."""
        op = self.view_op(t)
        return [] if op is None else list(map(self.inplace_root, op.inputs))

    def views_and_owners(self, t: Tensor) -> Iterator[Tensor]:
        """Yields `t` and all tensors that it is a view of, each once, parents before views."""
        stack, done = [(t, False)], set()
        while stack:
            t, is_ready = stack.pop()
            if is_ready:
                yield t
            elif t not in done:
                done.add(t)
                stack.append((t, True))
                stack += [(p, False) for p in self.view_parents(t)]

    def owners(self, t: Tensor) -> list[Tensor]:
        """Returns the tensors whose storage the view `t` reads; `t` itself if it is no view."""
        return [
            part
            for part in self.views_and_owners(self.inplace_root(t))
            if self.view_op(part) is None
        ]

    def evaluate_view(
        self, t: Tensor, evaluate_owner: Callable[[Tensor], np.ndarray]
    ) -> np.ndarray:
        """Computes which elements of its owners the view `t` reads: int32, of the shape of `t`.

        Args:
            evaluate_owner: an owner's numbers, int32 of its shape.
        """
        numbers: dict[Tensor, np.ndarray] = {}
        parts = list(self.views_and_owners(t))
        pending_uses = Counter(p for part in parts for p in self.view_parents(part))
        with jax.ensure_compile_time_eval():
            for part in parts:
                op = self.view_op(part)
                if op is None:
                    numbers[part] = evaluate_owner(part)
                else:
                    assert op.defn.lower is not None
                    inputs = [numbers[p] for p in self.view_parents(part)]
                    numbers[part] = np.asarray(op.defn.lower(*inputs, **op.attrs))
                for p in self.view_parents(part):
                    pending_uses[p] -= 1
                    if not pending_uses[p]:
                        del numbers[p]
        return numbers[t]


def element_indices(t: Tensor, first_index: int = 0) -> np.ndarray:
    """Returns flat element indices for a tensor from `first_index` on: int32, in its shape."""
    return np.arange(first_index, first_index + t.nelms, dtype=np.int32).reshape(t.shape)


def owners(t: Tensor) -> list[Tensor]:
    """Returns the tensors whose storage the view `t` reads; `t` itself if it is no view."""
    return AliasAnalysis().owners(t)
