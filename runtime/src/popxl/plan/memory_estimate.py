"""Liveness-based estimate of a segment's temporary memory, before XLA has compiled it.

XLA fuses a value into its use, unless that reads memory: a product, a loop, a result. So the values
in memory are those that kernels write and read. They are live from their kernel to their last use,
in program order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import compress
from typing import Any

from popxl.ops._cudnn_attention import workspace_bytes
from popxl.plan.flat_jaxpr import FlatFunction, PrimitiveNode, PrimitiveValue
from popxl.plan.gpu_kernels import FusedAdd, GpuKernels
from popxl.plan.primitives import (
    MATERIALISED,
    PICKS,
    RANDOM_BITS,
    SCATTERS,
    is_float8,
    lowering_of,
    nbytes,
)
from popxl.plan.records import Kernel
from popxl.plan.result_memory import Lifetime, values_in_results, without_donated
from popxl.plan.sibling_fusion import joined_reads


class LivenessModel:
    """Model of which values of a flat JAX function are in device memory, and when.

    Args:
        platform: "cpu", "gpu" or "tpu", for which the function is compiled.
        donated: arguments that may be overwritten.
    """

    def __init__(self, flat: FlatFunction, platform: str, donated: Iterable[Any] = ()) -> None:
        self._flat, self._platform = flat, platform
        self._kept = set(flat.inputs) - set(donated)
        self._uses = Counter(v for node in flat.nodes for v in node.inputs)
        self._gpu = None if platform == "cpu" else GpuKernels(flat)
        self._names: dict[Any, Any] = {}  # aliases: values in the memory of another value
        written = set()  # values that the program materializes
        for node in flat.nodes:
            if (source := self._alias_source(node)) is not None:
                self._names[node.outputs[0]] = self.memory_owner(source)
            if node.name in MATERIALISED:
                written.add(self.memory_owner(node.inputs[0]))
        outputs = [self.memory_owner(v) for v in flat.outputs]
        self._outside = {*flat.inputs, *outputs}
        self.stored = self._outside | written
        for node in flat.nodes:
            if self._is_kernel(node):
                outputs = self.results_of(node)
                self.stored.update(self.memory_owner(v) for v in (*node.inputs, *outputs))
            elif lowering_of(node.name) == "reduction":
                self.stored.update(node.outputs)

    def _alias_source(self, node: PrimitiveNode) -> Any:
        """Returns the value whose memory a primitive's result shares; None if it has its own.

        That is its input in another shape or layout, or the float8 value that it scales back, which
        FP8 products read (`popxl.ops.fp8`).
        """
        if lowering_of(node.name) == "free" or (self._gpu and self._gpu.is_free_transpose(node)):
            return next(iter(node.inputs), None)
        if self.can_scatter_in_place(node):
            return node.atoms[0]
        if node.name not in ("convert_element_type", "mul"):
            return None
        large = [v for v in node.inputs if v.aval.shape]
        return large[0] if len(large) == 1 and is_float8(self.memory_owner(large[0])) else None

    def memory_owner(self, value: Any) -> Any:
        """Returns the value whose memory `value` shares; `value` itself if it has its own."""
        return self._names.get(value, value)

    def can_scatter_in_place(self, node: PrimitiveNode) -> bool:
        """True if a scatter primitive can reuse its operand's memory, which nothing else needs."""
        if node.name not in SCATTERS or not isinstance(node.atoms[0], PrimitiveValue):
            return False
        return self._uses[node.atoms[0]] == 1 and self.memory_owner(node.atoms[0]) not in self._kept

    @cached_property
    def bytes_read_by_node(self) -> list[dict[Any, int]]:
        """Returns, for each primitive, the values it reads from memory and the bytes of each.

        A fused value reads its operands where it is used, so nodes without a value in memory read
        nothing themselves.
        """
        through: dict[Any, dict[Any, int]] = {}
        reads = []
        for node in self._flat.nodes:
            read: dict[Any, int] = {}
            picked = math.prod(node.outputs[0].aval.shape) if node.name in PICKS else None
            for v in map(self.memory_owner, node.inputs):
                parts = {v: nbytes(v.aval)} if v in self.stored else through.get(v, {})
                for part, count in parts.items():
                    if picked is not None:
                        count = min(count, picked * part.aval.dtype.itemsize)
                    read[part] = min(read.get(part, 0) + count, nbytes(part.aval))
            makes = [v for v in node.outputs if v in self.stored]
            if not makes and not self._is_kernel(node):
                through.update(dict.fromkeys(node.outputs, read))
                read = {}
            reads.append(read)
        return reads

    @cached_property
    def joined_reads(self) -> dict[PrimitiveNode, set[Any]]:
        """Returns, by node, the values in memory that a kernel joined with its own reads."""
        if self._gpu is None:
            return {}
        return joined_reads(self._flat.nodes, self.bytes_read_by_node, self._is_joinable)

    def _is_joinable(self, node: PrimitiveNode) -> bool:
        writes = any(v in self.stored for v in node.outputs)
        lowering = lowering_of(node.name, self._platform)
        is_sum = lowering == "reduction" and "axes" in node.params
        is_kernel = writes and not node.has_bodies and not self.is_fused_add(node)
        return is_kernel and (lowering == "fused" or is_sum)

    def peak_bytes(self, is_body: bool = False) -> int:
        """Returns the peak bytes of temporaries that are live at one time.

        Args:
            is_body: true for a loop's body or a branch: its caller owns the memory of its results.
        """
        elsewhere = self._outside | (set() if is_body else self._values_in_results())
        ends = {v: life.end for v, life in self._lifetimes.items() if v not in elsewhere}
        live = peak = 0
        for i, node in enumerate(self._flat.nodes):
            new = [v for v in node.outputs if v in ends]
            dying = [v for v in self.bytes_read_by_node[i] if ends.get(v) == i]
            live += sum(nbytes(v.aval) for v in new)
            workspace = workspace_bytes(node.name, [v.aval.shape for v in node.atoms])
            scratch = self.workspace_bytes(node) + workspace + self._body_peak(node)
            peak = max(peak, live - self._reused_bytes(node, new, dying) + scratch)
            live -= sum(nbytes(v.aval) for v in {*dying, *new} if ends[v] == i)
        return peak

    @cached_property
    def _lifetimes(self) -> dict[Any, Lifetime]:
        """Returns the lifetimes of values that primitives write to memory."""
        last = {v: i for i, read in enumerate(self.bytes_read_by_node) for v in read}
        last |= dict.fromkeys(self._outside, len(self._flat.nodes))
        return {
            v: Lifetime(v, i, last.get(v, i), not self._is_kernel(node))
            for i, node in enumerate(self._flat.nodes)
            for v in node.outputs
            if v in self.stored
        }

    def _values_in_results(self) -> set[Any]:
        """Returns the temporaries that are placed in memory of results."""
        results = dict.fromkeys(map(self.memory_owner, self._flat.outputs))
        own = without_donated(results, (v for v in self._flat.inputs if v not in self._kept))
        return values_in_results(
            (life for v, life in self._lifetimes.items() if v not in self._outside),
            (self._lifetimes[v] for v in own if v in self._lifetimes),
        )

    def _is_kernel(self, node: PrimitiveNode) -> bool:
        return node.has_bodies or lowering_of(node.name, self._platform) == "kernel"

    def _reused_bytes(self, node: PrimitiveNode, new: Sequence[Any], dying: Sequence[Any]) -> int:
        """Returns the bytes of new values that reuse the memory of values at their last use.

        Loops do that, and elementwise kernels if sizes are equal, but on a GPU not those that read
        products or other calls of libraries: XLA writes over no part of a tuple.

        Args:
            dying: values that the node reads last.
        """
        if node.has_bodies:
            return min(sum(nbytes(v.aval) for v in dying), sum(nbytes(v.aval) for v in new))
        is_free = [self._gpu is None or self._lifetimes[v].can_overwrite for v in dying]
        sizes = [nbytes(v.aval) for v in compress(dying, is_free)]
        reused = 0
        for size in (nbytes(v.aval) for v in new if not self._is_kernel(node)):
            if size in sizes:
                sizes.remove(size)
                reused += size
        return reused

    def workspace_bytes(self, node: PrimitiveNode) -> int:
        """Returns the scratch bytes of a primitive's kernel, besides its operands and results."""
        if node.name == RANDOM_BITS and self._is_kernel(node):
            return nbytes(node.outputs[-1].aval)  # drawn as two halves, then joined
        return 0

    def fused_add(self, node: PrimitiveNode) -> FusedAdd | None:
        """Returns the addition that XLA fuses into a matmul; None if there is none."""
        return self._gpu.fused_adds.get(node) if self._gpu else None

    def results_of(self, node: PrimitiveNode) -> list[PrimitiveValue]:
        """Returns what a primitive's kernel makes: for a matmul, the sum that is fused into it."""
        added = self.fused_add(node)
        return node.outputs if added is None else added.node.outputs

    def is_fused_add(self, node: PrimitiveNode) -> bool:
        """True if a primitive is an addition that XLA fuses into a matmul."""
        return self._gpu is not None and node in self._gpu.fused_add_nodes

    def kernels_launched_with(self, node: PrimitiveNode) -> list[Kernel]:
        """Returns the kernels that XLA launches for a primitive besides its main kernel."""
        if self._gpu is None:
            return []
        float8 = filter(is_float8, map(self.memory_owner, self._gpu.transposed_operands(node)))
        copies = [Kernel(2 * nbytes(v.aval)) for v in float8]
        return copies + self._gpu.kernels_launched_with_attention(node)

    def _body_peak(self, node: PrimitiveNode) -> int:
        """Returns the largest peak bytes of the loop bodies or branches that a primitive runs."""
        bodies = [*(body for body, _ in node.bodies), *node.branches]
        models = (LivenessModel(body, self._platform) for body in bodies)
        return max((model.peak_bytes(is_body=True) for model in models), default=0)
