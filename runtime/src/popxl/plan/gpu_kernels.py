"""GPU corrections to the cost model: ops that XLA fuses away, and extra kernels it launches.

Products take transposed matrices, and add a matrix or a bias as they are written. Those of float8
contract last axes: an operand in another layout is transposed. cuDNN's attention has heads after
tokens: queries, keys, values and their gradients in another layout are copied.
`tests/planning/test_h100.py` compares these rules with XLA's executables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from popxl.plan.flat_jaxpr import FlatFunction, PrimitiveNode
from popxl.plan.primitives import attention_head_dim_and_direction, nbytes
from popxl.plan.records import Kernel

_HEADS_AFTER_TOKENS = (0, 2, 1, 3)
_SAME_ELEMENTS = ("convert_element_type", "reshape")


class FusedAdd(NamedTuple):
    """An addition that a product makes as it writes its result.

    Attributes:
        nbytes: of the matrix that is read for it; 0: a bias.
    """

    node: PrimitiveNode
    nbytes: int


class GpuKernels:
    """Kernels of a function on a GPU that differ from one kernel per primitive."""

    def __init__(self, flat: FlatFunction) -> None:
        self._inputs, self._results = set(flat.inputs), set(flat.outputs)
        self._makers = {v: node for node in flat.nodes for v in node.outputs}
        self._users: dict[Any, list[PrimitiveNode]] = {}
        for node in flat.nodes:
            for v in node.inputs:
                self._users.setdefault(v, []).append(node)
        self.fused_adds: dict[PrimitiveNode, FusedAdd] = {}
        self.fused_add_nodes: set[PrimitiveNode] = set()
        for node in flat.nodes:
            added = self._fused_add(node) if node.name == "dot_general" else None
            if added is not None and added.node not in self.fused_add_nodes:
                self.fused_adds[node] = added
                self.fused_add_nodes.add(added.node)

    def _fused_add(self, product: PrimitiveNode) -> FusedAdd | None:
        """Returns the addition that XLA's GemmRewriter fuses into a product.

        It adds float32 to a product of halves only where nothing else reads the sum.
        """
        node, term = product, product.outputs[0]
        while node is product or node.name in _SAME_ELEMENTS:
            term = node.outputs[0]
            users = self._users.get(term, [])
            if len(users) != 1 or term in self._results:
                return None
            (node,) = users
        if node.name != "add" or len(set(node.inputs)) != 2:
            return None
        (addend,) = {*node.inputs} - {term}
        total = node.outputs[0]
        is_widened = total.aval.dtype != product.outputs[0].aval.dtype
        if addend.aval.shape != total.aval.shape or self._is_broadcast(addend):
            return None if is_widened else FusedAdd(node, 0)
        if not self._is_in_memory(addend) or (is_widened and self._users.get(total)):
            return None
        return FusedAdd(node, nbytes(addend.aval))

    def _is_broadcast(self, value: Any) -> bool:
        maker = self._makers.get(value)
        return maker is not None and maker.name == "broadcast_in_dim"

    def _is_in_memory(self, value: Any) -> bool:
        """True for an argument and for the result of a product."""
        maker = self._makers.get(value)
        if maker is not None and maker.name in _SAME_ELEMENTS and maker.inputs:
            return self._is_in_memory(maker.inputs[0])
        return value in self._inputs or (maker is not None and maker.name == "dot_general")

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

    @staticmethod
    def transposed_operands(node: PrimitiveNode) -> list[Any]:
        """Returns the operands of a product whose last axis is not contracted."""
        if node.name != "dot_general":
            return []
        contracted = node.params["dimension_numbers"][0]
        pairs = zip(node.inputs, contracted, strict=False)
        return [v for v, axes in pairs if axes != (len(v.aval.shape) - 1,)]

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
