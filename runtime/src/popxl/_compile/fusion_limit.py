"""Limit on the number of ops that XLA fuses into one CPU kernel.

XLA fuses elementwise ops without a limit, and the compile time of a kernel grows faster than its
size: with 500 steps of a chain and its gradient in one kernel, compilation does not finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from popxl._ir.op_registry import registry
from popxl.ops._reductions import traced_platform
from popxl.ops.placement import materialize_array

if TYPE_CHECKING:
    from popxl._analysis.functionalization import Node

_MAX_OPS = 256  # ops in a kernel
_FUSED = frozenset(("elementwise", "movement", "reduction"))  # tags
_ALSO_FUSED = ("grad_sum", "grad_maximum", "slice_grad", "ipu_copy", "io_tile_copy")


class FusionLimiter:
    """Tracks which ops XLA could fuse into the kernel of each value, while a segment is traced."""

    def __init__(self) -> None:
        # By the id of an array, which is referenced here so that its id stays unique.
        self._ops: dict[int, tuple[Any, frozenset[int]]] = {}
        self._numbers = count()

    def limit_fusion(
        self, node: Node, arrays: Sequence[Any], results: Sequence[Any]
    ) -> Sequence[Any]:
        """Returns a node's results, materialized where XLA could fuse too many ops with them."""
        if traced_platform() != "cpu" or not _is_fused(node):
            return results
        before = (self._ops[id(x)][1] for x in arrays if id(x) in self._ops)
        ops = frozenset((next(self._numbers),)).union(*before)
        if len(ops) > _MAX_OPS:
            return [materialize_array(x) for x in results]
        self._ops.update((id(x), (x, ops)) for x in results)
        return results


def _is_fused(node: Node) -> bool:
    op = node.op
    if op is None or node.kind != "op" or node.regions:
        return False
    defn = registry()[op.attrs["op_name"]] if op.defn.name == "vjp" else op.defn
    return defn.name in _ALSO_FUSED or not _FUSED.isdisjoint(defn.tags)
