"""GPU corrections to the cost model: ops that XLA fuses away, and extra kernels it launches.

Products take transposed matrices, and add to an accumulator as they are written. cuDNN's attention
has heads after tokens: queries, keys, values and their gradients in another layout are copied.
`tests/planning/test_h100.py` compares these rules with XLA's executables.
"""

from __future__ import annotations

from typing import Any

from popxl.plan.flat_jaxpr import FlatFunction, PrimitiveNode
from popxl.plan.primitives import attention_head_dim_and_direction, nbytes
from popxl.plan.records import Kernel

_HEADS_AFTER_TOKENS = (0, 2, 1, 3)


class GpuKernels:
    """Kernels of a function on a GPU that differ from one kernel per primitive."""

    def __init__(self, flat: FlatFunction) -> None:
        self._inputs, self._results = set(flat.inputs), set(flat.outputs)
        self._makers = {v: node for node in flat.nodes for v in node.outputs}
        self._users: dict[Any, list[PrimitiveNode]] = {}
        for node in flat.nodes:
            for v in node.inputs:
                self._users.setdefault(v, []).append(node)
        sums = {node: self._fused_add(node) for node in flat.nodes if node.name == "dot_general"}
        self.fused_adds = {node: into for node, into in sums.items() if into is not None}
        """Additions fused into products: cublasLt's C += A B."""
        self.fused_add_nodes = set(self.fused_adds.values())

    def _fused_add(self, product: PrimitiveNode) -> PrimitiveNode | None:
        node = product
        while node is product or node.name == "convert_element_type":
            users = self._users.get(node.outputs[0], [])
            if len(users) != 1 or node.outputs[0] in self._results:
                return None
            (node,) = users
        into_float32 = node.name == "add" and node.outputs[0].aval.dtype == "float32"
        return node if into_float32 and not self._inputs.isdisjoint(node.inputs) else None

    def is_free_transpose(self, node: PrimitiveNode) -> bool:
        """True if a GPU transpose costs nothing, since an adjacent kernel reads that layout."""
        if node.name != "transpose" or not node.inputs or node.outputs[0] in self._results:
            return False
        users = self._users.get(node.outputs[0], [])
        if _swaps_matrices(node):
            return all(user.name == "dot_general" for user in users)
        maker = self._makers.get(node.inputs[0])
        if _undoes(node, maker) or (users and all(_undoes(user, node) for user in users)):
            return True
        is_gradient = maker is not None and attention_head_dim_and_direction(maker)[1]
        return _swaps_heads(node) and (is_gradient or all(map(_is_attention, users)))

    def kernels_launched_with_attention(self, node: PrimitiveNode) -> list[Kernel]:
        """Returns the copies, by kernels of their own, of a fused-attention kernel's tensors.

        The output and its gradient have heads after tokens, as the kernel has them.
        """
        size, backward = attention_head_dim_and_direction(node)
        if not size:
            return []
        heads = node.inputs[1:4] if backward else node.inputs[:3]
        inputs = [v for v in heads if not self._is_transposed(v)]
        results = [v for v in node.outputs if backward and v in self._results]
        return [Kernel(2 * nbytes(v.aval)) for v in (*inputs, *results)]

    def _is_transposed(self, value: Any) -> bool:
        maker = self._makers.get(value)
        return maker is not None and maker.name == "transpose" and _swaps_heads(maker)


def _is_attention(node: PrimitiveNode | None) -> bool:
    return node is not None and attention_head_dim_and_direction(node)[0] > 0


def _swaps_matrices(node: PrimitiveNode) -> bool:
    *batch, rows, columns = node.params["permutation"]
    return [*batch, columns, rows] == [*range(len(batch) + 2)]


def _swaps_heads(node: PrimitiveNode) -> bool:
    return tuple(node.params["permutation"]) == _HEADS_AFTER_TOKENS


def _undoes(node: PrimitiveNode, before: PrimitiveNode | None) -> bool:
    """True if `node` transposes the result of `before` to what that has transposed."""
    if before is None or not node.name == before.name == "transpose":
        return False
    first, then = before.params["permutation"], node.params["permutation"]
    return [first[axis] for axis in then] == [*range(len(first))]
