"""Adding up what the kernels of a program do, part by part."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from popxl.plan.fusion import Kernel, kernels_of
from popxl.plan.records import Collective, Part
from popxl.plan.storage import Storage
from popxl.plan.values import Block, Node

_GATHERS = frozenset("gather slice dynamic_slice".split())  # read what they return, not their input


@dataclass
class _Sums:
    flops: int = 0
    arithmetic: int = 0
    device_traffic: int = 0
    host_to_device: int = 0
    device_to_host: int = 0
    ops: Counter[str] = field(default_factory=Counter)
    collectives: dict[tuple[str, int, bool], list[int]] = field(default_factory=dict)


class Tally:
    """Sums by part, in order of first execution."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = defaultdict(_Sums)
        self._storage = Storage()

    def add(self, block: Block, times: int = 1) -> None:
        """Count `times` executions of a block."""
        for node in block.nodes:
            self._name(node)
        for (part, op), count in block.ops.items():
            self._sums[part].ops[op] += count * times
        for node in block.nodes:
            sums = self._sums[node.part]
            sums.flops += node.flops * times
            sums.arithmetic += node.arithmetic * times
            self._add_bodies(node, times)
        for kernel in kernels_of(block, self._storage):
            self._add_kernel(kernel, times)

    def _name(self, node: Node) -> None:
        """Make the sums of the parts that run in a node, in order."""
        for body in node.bodies:
            for inner in body.nodes:
                self._name(inner)
        if not node.bodies:
            self._sums[node.part]

    def _add_bodies(self, node: Node, times: int) -> None:
        if node.kind == "branch":
            self.add(max(node.bodies, key=_work), times)  # the dearer branch
        else:
            for body in node.bodies:
                self.add(body, times * node.count)

    def _add_kernel(self, kernel: Kernel, times: int) -> None:
        root = kernel.root
        sums = self._sums[kernel.part]
        if root.kind in ("loop", "branch", "effect"):
            return
        written = sum(v.nbytes for v in root.outputs)
        sums.device_traffic += times * (_bytes_read(kernel, written) + written)
        if root.kind == "load":
            sums.host_to_device += times * written
        elif root.kind == "store":
            sums.device_to_host += times * root.inputs[0].nbytes
        elif root.kind == "collective":
            self._add_collective(root, times)

    def _add_collective(self, node: Node, times: int) -> None:
        group = node.facts["group"]
        key = node.name, group.group_size, group.is_const and group.stride == 1
        whole = max(v.nbytes for v in (*node.inputs, *node.outputs))
        found = self._sums[node.part].collectives.setdefault(key, [0, 0])
        found[0] += times
        found[1] += times * whole

    def parts(self, device_bytes: dict[str, int]) -> tuple[Part, ...]:
        """The record of each part."""
        return tuple(
            Part(
                name,
                sums.flops,
                sums.arithmetic,
                sums.device_traffic,
                sums.host_to_device,
                sums.device_to_host,
                tuple(Collective(*key, *found) for key, found in sorted(sums.collectives.items())),
                dict(sorted(sums.ops.items())),
                device_bytes.get(name, 0),
            )
            for name, sums in self._sums.items()
        )


def _bytes_read(kernel: Kernel, written: int) -> int:
    """Bytes a kernel reads; one that picks elements reads no more than it returns."""
    picked: set[Any] = {
        v for node in kernel.nodes if node.name in _GATHERS for v in node.inputs[:1]
    }
    return sum(min(v.nbytes, written) if v in picked else v.nbytes for v in kernel.reads)


def _work(block: Block) -> tuple[int, int]:
    """Operations of a block, to tell which branch is dearer."""
    total = [0, 0]
    for node in block.nodes:
        inner = [_work(body) for body in node.bodies]
        for i, own in enumerate((node.flops, node.arithmetic)):
            total[i] += own + node.count * max((work[i] for work in inner), default=0)
    return total[0], total[1]
