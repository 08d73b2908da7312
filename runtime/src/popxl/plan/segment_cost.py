"""Cost of a segment, computed from the jaxpr that XLA would compile."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from popxl._compile.segment_function import replica_function
from popxl._schedule.segment import argument_specs, donated_argnums, program_context
from popxl.ops._collective import AXIS
from popxl.ops._reductions import tracing_platform
from popxl.plan.common_subexpressions import merge_equal_nodes
from popxl.plan.flat_jaxpr import FlatFunction, PrimitiveNode, flatten_jaxpr
from popxl.plan.memory_estimate import LivenessModel
from popxl.plan.primitives import (
    COLLECTIVES,
    arithmetic_ops_of,
    attention_head_dim_and_direction,
    flops_of,
    is_float8,
    lowering_of,
    nbytes,
)
from popxl.plan.records import Collective, Kernel

if TYPE_CHECKING:
    from popxl._schedule.segment import Segment
    from popxl.plan.rates import Rates

Key = tuple[str, int, bool]  # of collectives: kind, group size, true if consecutive


@dataclass
class Cost:
    """FLOPs, bytes and collectives summed over the kernels of a labelled region.

    Attributes:
        flops, float8_flops, arithmetic, traffic: see `popxl.plan.RegionCost`.
        collectives: number and bytes, by key.
        kernels: number of each kernel.
    """

    flops: int = 0
    float8_flops: int = 0
    arithmetic: int = 0
    traffic: int = 0
    collectives: dict[Key, Counter[str]] = field(default_factory=dict)
    kernels: Counter[Kernel] = field(default_factory=Counter)

    def add(self, other: Cost, times: int = 1) -> None:
        self.flops += times * other.flops
        self.float8_flops += times * other.float8_flops
        self.arithmetic += times * other.arithmetic
        self.traffic += times * other.traffic
        for kernel, count in other.kernels.items():
            self.kernels[kernel] += times * count
        for key, counts in other.collectives.items():
            mine = self.collectives.setdefault(key, Counter())
            for what, n in counts.items():
                mine[what] += times * n

    def seconds(self, rates: Rates) -> float:
        """Returns the seconds of all kernels and collectives on one stream, without overlap."""
        collectives = (
            Collective(*key, counts["count"], counts["nbytes"])
            for key, counts in self.collectives.items()
        )
        return rates.kernel_seconds(self.kernels) + rates.collective_seconds(collectives)


@dataclass(frozen=True)
class SegmentCost:
    """The cost of one execution of a segment on one replica.

    Attributes:
        parts: costs by label of the ops; "": the region that runs the segment.
        temporaries: estimated bytes of its temporaries.
    """

    parts: dict[str, Cost]
    temporaries: int

    def dispatch_seconds(self, rates: Rates) -> float:
        """Returns the seconds in which the host dispatches the segment."""
        kernels = sum(sum(cost.kernels.values()) for cost in self.parts.values())
        return rates.dispatch_s + rates.kernel_launch_s * kernels

    def seconds(self, rates: Rates) -> float:
        """Returns the device seconds of the segment (see `Cost.seconds`)."""
        return sum(cost.seconds(rates) for cost in self.parts.values())


def trace_cost(segment: Segment) -> SegmentCost:
    """Traces `segment` with shapes only, and sums the costs of its primitives."""
    context = program_context(segment)
    specs = [
        jax.ShapeDtypeStruct(spec.shape, spec.dtype.as_jax()) for spec, _ in argument_specs(segment)
    ]
    function = replica_function(segment)
    with tracing_platform(context.target):
        closed = jax.make_jaxpr(function, axis_env=[(AXIS, context.replicas)])(*specs)
    flat = flatten_jaxpr(closed.jaxpr)
    merge_equal_nodes(flat)
    arguments = flat.inputs[len(flat.inputs) - len(specs) :]
    liveness = LivenessModel(flat, context.target, [arguments[i] for i in donated_argnums(segment)])
    counter = CostCounter(context.replicas, context.target)
    counter.count_function(flat, 1, liveness)
    return SegmentCost(counter.parts, liveness.peak_bytes())


class CostCounter:
    def __init__(self, replicas: int, platform: str) -> None:
        self.parts: dict[str, Cost] = {}
        self._replicas, self._platform = replicas, platform

    def count_function(
        self, flat: FlatFunction, times: int, liveness: LivenessModel | None = None
    ) -> None:
        """Adds the costs of `times` executions of a flat JAX function."""
        liveness = liveness or LivenessModel(flat, self._platform)
        for node, reads in zip(flat.nodes, liveness.bytes_read_by_node, strict=True):
            for body, count in node.bodies:
                self.count_function(body, times * count)
            if node.branches:
                self._add_costliest_branch(node, times)
            if not node.has_bodies:
                self._count_node(node, times, liveness, reads)

    def _add_costliest_branch(self, node: PrimitiveNode, times: int) -> None:
        """Adds the cost of a conditional primitive's most expensive branch."""
        counters = [CostCounter(self._replicas, self._platform) for _ in node.branches]
        for counter, branch in zip(counters, node.branches, strict=True):
            counter.count_function(branch, 1)
        dearest = max(counters, key=lambda c: sum(w.flops + w.traffic for w in c.parts.values()))
        for label, cost in dearest.parts.items():
            self._region_cost(label).add(cost, times)

    def _region_cost(self, part: str) -> Cost:
        return self.parts.setdefault(part, Cost())

    def _count_node(
        self, node: PrimitiveNode, times: int, liveness: LivenessModel, reads: dict[Any, int]
    ) -> None:
        cost, flops, bytes_moved = self._region_cost(node.part), flops_of(node), 0
        if lowering_of(node.name) != "free" and not liveness.is_fused_add(node):
            bytes_moved = self._bytes_moved(node, liveness, reads)
        float8 = bool(flops) and all(is_float8(liveness.memory_owner(v)) for v in node.atoms)
        cost.flops += times * flops
        cost.float8_flops += times * flops * float8
        cost.arithmetic += times * arithmetic_ops_of(node)
        cost.traffic += times * bytes_moved
        if node.name in COLLECTIVES:
            self._count_collective(node, cost, times)
        elif flops or bytes_moved:
            added = _added_bytes(node, liveness)
            cost.kernels[
                Kernel(bytes_moved, flops, float8, *attention_head_dim_and_direction(node), added)
            ] += times
        for kernel in liveness.kernels_launched_with(node):
            cost.flops += times * kernel.flops
            cost.traffic += times * kernel.nbytes
            cost.kernels[kernel] += times

    @staticmethod
    def _bytes_moved(node: PrimitiveNode, liveness: LivenessModel, reads: dict[Any, int]) -> int:
        """Returns the bytes that a primitive's kernel reads and writes.

        A scatter writes only its rows, unless the array is still needed and XLA copies it.
        """
        if liveness.can_scatter_in_place(node):
            return 3 * nbytes(node.atoms[2].aval) + nbytes(node.atoms[1].aval)
        extra, added = liveness.workspace_bytes(node), liveness.fused_add(node)
        results = liveness.results_of(node)
        written = sum(nbytes(v.aval) for v in results if v in liveness.stored)
        again = liveness.joined_reads.get(node, ())
        read = sum(nbytes for value, nbytes in reads.items() if value not in again)
        return read + (added.nbytes if added else 0) + written + 2 * extra

    def _count_collective(self, node: PrimitiveNode, cost: Cost, times: int) -> None:
        groups = node.params.get("axis_index_groups")
        members = list(range(self._replicas)) if groups is None else list(groups[0])
        if len(members) == 1:
            return
        consecutive = members == list(range(members[0], members[0] + len(members)))
        key = COLLECTIVES[node.name], len(members), consecutive
        full_bytes = max(nbytes(v.aval) for v in (*node.inputs, *node.outputs))
        cost.collectives.setdefault(key, Counter()).update(count=times, nbytes=times * full_bytes)


def _added_bytes(product: PrimitiveNode, liveness: LivenessModel) -> int:
    """Returns the bytes of a matmul's kernel that it moves only to add, see `Kernel.added`."""
    added = liveness.fused_add(product)
    if added is None or not added.nbytes:
        return 0
    is_accumulator = added.node.outputs[0].aval.dtype == "float32"
    return added.nbytes * (2 if is_accumulator else 1)
