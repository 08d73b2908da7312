"""Merging of nested views into one op; long chains become a gather by element indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from popxl._analysis.alias_analysis import AliasAnalysis, element_indices
from popxl._ir.op_registry import OpDef, define
from popxl.tensor import detached_constant

if TYPE_CHECKING:
    from popxl._ir.op import Op
    from popxl.tensor import Constant, Tensor


_MAX_INDEX_BITS = 128
"""Largest sum of index bits over a chain of views that is computed view by view: for longer chains
XLA's index arithmetic overflows and recurses until the process dies."""


class MergedViews(AliasAnalysis):
    """Alias analysis in which nested views are one op, and a long chain of views is one gather.

    Attributes:
        elements: element numbers of views that gather.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[Tensor, Constant] = {}
        self._merged = AliasAnalysis()  # without picking
        self.replacements = self._merged.replacements
        self._index_bits: dict[Tensor, int] = {}  # of the views between a view and its owners
        self._far_views: dict[
            Tensor, Op | None
        ] = {}  # views that pick, and how, if somebody has asked

    def add(self, op: Op) -> None:
        """Records a view op, merged with the views that it reads where possible."""
        (t,) = op.outputs
        first = super().view_op(self.inplace_root(op.inputs[0]))
        if first is not None and op.defn.merge is not None:
            merged = op.defn.merge(first, op)
            if merged is not None:
                self.replacements[t] = _copy_op(op, *merged, first.inputs)
        own_bits = t.nelms.bit_length()
        bits = own_bits + max(self._index_bits.get(p, 0) for p in self.view_parents(t))
        if bits > _MAX_INDEX_BITS:
            self._far_views[t] = None
        self._index_bits[t] = own_bits if t in self._far_views else bits

    def view_op(self, t: Tensor) -> Op | None:
        """Returns the merged op that makes `t` a view; None if `t` owns its storage."""
        if t not in self._far_views:
            return super().view_op(t)
        if self._far_views[t] is None:
            self._far_views[t] = self._gather_elements(t)
        return self._far_views[t]

    def _gather_elements(self, t: Tensor) -> Op:
        """Returns an op that gathers the elements of view `t` from the tensors that own them.

        The element indices are a constant tensor: as literals in the code they would cost XLA
        gigabytes.
        """
        op, owners = super().view_op(t), self._merged.owners(t)
        assert op is not None
        first = dict(zip(owners, accumulate((o.nelms for o in owners), initial=0), strict=False))
        elements = self._merged.evaluate_view(t, lambda owner: element_indices(owner, first[owner]))
        self.elements[t] = detached_constant(t._graph, elements)
        return _copy_op(op, _GATHER, {}, owners)


def _copy_op(op: Op, defn: OpDef, attrs: Mapping[str, Any], inputs: Sequence[Tensor]) -> Op:
    new_op = copy(op)
    new_op.defn, new_op.attrs, new_op.inputs = defn, dict(attrs), list(inputs)
    return new_op


# ---- picking ------------------------------------------------------------------------------------
def _concat_flat(arrays: Sequence[Any]) -> Any:
    return jnp.concatenate([jnp.reshape(x, -1) for x in arrays])


def _read_elements(*args: Any) -> Any:
    *owners, elements = args
    return _concat_flat(owners).at[elements].get(mode="promise_in_bounds")


def _write_elements(args: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    *owners, elements = args
    joined = _concat_flat(owners).at[elements].set(value, mode="promise_in_bounds")
    parts = jnp.split(joined, np.cumsum([x.size for x in owners])[:-1])
    return tuple(part.reshape(x.shape) for part, x in zip(parts, owners, strict=True))


_GATHER = define("pick", _read_elements, view_write=_write_elements)
