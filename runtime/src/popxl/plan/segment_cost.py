"""What a segment does, read off the function that XLA would compile."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from popxl._compile.segment_function import replica_function
from popxl._schedule.segment import argument_specs, donated, facts_of
from popxl.ops._collective import AXIS
from popxl.ops._reductions import tracing_platform
from popxl.plan.flat_jaxpr import Flat, Node, flatten
from popxl.plan.memory_estimate import Memory
from popxl.plan.primitives import (
    COLLECTIVES,
    arithmetic_of,
    attention_of,
    flops_of,
    is_float8,
    kind_of,
    nbytes,
)
from popxl.plan.records import Collective, Kernel

if TYPE_CHECKING:
    from popxl._schedule.segment import Segment
    from popxl.plan.rates import Rates

Key = tuple[str, int, bool]  # of collectives: kind, size of the group, whether it is consecutive


@dataclass
class Work:
    """Sums over the kernels of a part.

    Attributes:
        flops, float8_flops, arithmetic, traffic: see `popxl.plan.Part`.
        collectives: number and bytes, by key.
        kernels: how many of each.
    """

    flops: int = 0
    float8_flops: int = 0
    arithmetic: int = 0
    traffic: int = 0
    collectives: dict[Key, Counter[str]] = field(default_factory=dict)
    kernels: Counter[Kernel] = field(default_factory=Counter)

    def add(self, other: Work, times: int = 1) -> None:
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
        """Its kernels and then its collectives, one after the other, as one stream runs them."""
        collectives = (
            Collective(*key, counts["count"], counts["nbytes"])
            for key, counts in self.collectives.items()
        )
        return rates.kernels(self.kernels) + rates.exchange(collectives)


@dataclass(frozen=True)
class SegmentWork:
    """What one execution of a segment does, on one replica.

    Attributes:
        parts: work by label of the ops; "": of the part that runs the segment.
        temporaries: an estimate of the bytes it takes besides its arguments and results.
    """

    parts: dict[str, Work]
    temporaries: int

    def dispatch(self, rates: Rates) -> float:
        """How long the host takes to dispatch it."""
        kernels = sum(sum(work.kernels.values()) for work in self.parts.values())
        return rates.run + rates.launch * kernels

    def seconds(self, rates: Rates) -> float:
        """How long it takes; see `Work.seconds`."""
        return sum(work.seconds(rates) for work in self.parts.values())


def work_of(segment: Segment) -> SegmentWork:
    """Trace `segment` with shapes, and add up what its primitives do."""
    facts = facts_of(segment)
    specs = [
        jax.ShapeDtypeStruct(spec.shape, spec.dtype.as_jax()) for spec, _ in argument_specs(segment)
    ]
    function = replica_function(segment)
    with tracing_platform(facts.target):
        closed = jax.make_jaxpr(function, axis_env=[(AXIS, facts.replicas)])(*specs)
    flat = flatten(closed.jaxpr)
    arguments = flat.inputs[len(flat.inputs) - len(specs) :]
    memory = Memory(flat, facts.target, [arguments[i] for i in donated(segment)])
    counter = _Counter(facts.replicas, facts.target)
    counter.count(flat, 1, memory)
    return SegmentWork(counter.parts, memory.peak())


class _Counter:
    def __init__(self, replicas: int, platform: str) -> None:
        self.parts: dict[str, Work] = {}
        self._replicas, self._platform = replicas, platform

    def count(self, flat: Flat, times: int, memory: Memory | None = None) -> None:
        """Count `times` executions of a function."""
        memory = memory or Memory(flat, self._platform)
        for node, reads in zip(flat.nodes, memory.reads, strict=True):
            for body, count in node.bodies:
                self.count(body, times * count)
            if node.branches:
                self._dearest(node, times)
            if not node.runs_others:
                self._node(node, times, memory, reads)

    def _dearest(self, node: Node, times: int) -> None:
        """Of branches that exclude each other the one with the most work counts."""
        counters = [_Counter(self._replicas, self._platform) for _ in node.branches]
        for counter, branch in zip(counters, node.branches, strict=True):
            counter.count(branch, 1)
        dearest = max(counters, key=lambda c: sum(w.flops + w.traffic for w in c.parts.values()))
        for label, work in dearest.parts.items():
            self._of(label).add(work, times)

    def _of(self, part: str) -> Work:
        return self.parts.setdefault(part, Work())

    def _node(self, node: Node, times: int, memory: Memory, reads: dict[Any, int]) -> None:
        work, flops, moved = self._of(node.part), flops_of(node), 0
        if kind_of(node.name) != "free" and not memory.is_in_product(node):
            moved = self._moved(node, memory, reads)
        float8 = bool(flops) and all(is_float8(memory.name(v)) for v in node.atoms)
        work.flops += times * flops
        work.float8_flops += times * flops * float8
        work.arithmetic += times * arithmetic_of(node)
        work.traffic += times * moved
        if node.name in COLLECTIVES:
            self._collective(node, work, times)
        elif flops or moved:
            into = memory.sum_after(node)
            added = 0 if into is None else 2 * sum(nbytes(v.aval) for v in into.outputs)
            work.kernels[Kernel(moved, flops, float8, *attention_of(node), added)] += times
        for kernel in memory.around(node):
            work.flops += times * kernel.flops
            work.traffic += times * kernel.nbytes
            work.kernels[kernel] += times

    @staticmethod
    def _moved(node: Node, memory: Memory, reads: dict[Any, int]) -> int:
        """Bytes that a kernel reads and writes. What is scattered goes to its rows alone, unless
        the array is needed as it was, and XLA copies it."""
        if memory.scatters_in_place(node):
            return 3 * nbytes(node.atoms[2].aval) + nbytes(node.atoms[1].aval)
        extra, added = memory.extra(node), memory.sum_after(node)
        outputs = node.outputs if added is None else added.outputs
        written = sum(nbytes(v.aval) for v in outputs if v in memory.stored)
        return sum(reads.values()) + written * (2 if added else 1) + 2 * extra

    def _collective(self, node: Node, work: Work, times: int) -> None:
        groups = node.params.get("axis_index_groups")
        members = list(range(self._replicas)) if groups is None else list(groups[0])
        if len(members) == 1:
            return
        consecutive = members == list(range(members[0], members[0] + len(members)))
        key = COLLECTIVES[node.name], len(members), consecutive
        whole = max(nbytes(v.aval) for v in (*node.inputs, *node.outputs))
        work.collectives.setdefault(key, Counter()).update(count=times, nbytes=times * whole)
