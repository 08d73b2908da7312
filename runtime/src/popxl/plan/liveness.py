"""How much device memory values take while a program runs.

Each value in memory lives from the kernel that makes it to the last one that reads it. A kernel
may write where one of its inputs was, if that input is read for the last time, element by element.
A loop keeps one array for each value that it carries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from popxl.plan.fusion import Kernel, Storage, kernels_of
from popxl.plan.order import orders
from popxl.plan.values import Block, Value

_MOVES_ELEMENTS = frozenset(
    """broadcast_in_dim gather transpose rev concatenate pad slice dynamic_slice reduce_sum
    reduce_max reduce_min dot_general""".split()
)


@dataclass
class Peaks:
    """Largest number of bytes that were live.

    Attributes:
        total: at any time.
        parts: while a kernel of a part ran.
    """

    total: int = 0
    parts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def note(self, part: str | None, live: int) -> None:
        """Take in a moment at which `live` bytes were live."""
        self.total = max(self.total, live)
        if part is not None:
            self.parts[part] = max(self.parts[part], live)


def peaks(block: Block) -> Peaks:
    """Bytes of values that the program makes; arguments and constants are not counted."""
    found = Peaks()
    _Run(found).run(block, 0, ())
    return found


@dataclass
class _Run:
    """Attributes: `kernels`, `sizes`: of each block, in the order that needs least, and what it
    needs in that order."""

    peaks: Peaks
    storage: Storage = field(default_factory=Storage)
    kernels: dict[Block, list[Kernel]] = field(default_factory=dict)
    sizes: dict[Block, int] = field(default_factory=dict)

    def run(self, block: Block, below: int, carried: Iterable[Value]) -> int:
        """Go through a block and note peaks.

        Args:
            below: bytes that are live around it.
            carried: values whose memory the loop around it keeps.

        Returns:
            Bytes of the largest moment inside.
        """
        self._settle(block)
        return self._go(block, self.kernels[block], below, carried)

    def _settle(self, block: Block) -> None:
        """Choose the order of a block's kernels, and of those of the bodies in it."""
        if block in self.kernels:
            return
        for node in block.nodes:
            for body in node.bodies:
                self._settle(body)
        found = orders(kernels_of(block, self.storage), block, self.storage)
        sized = [(self._go(block, kernels, None, ()), kernels) for kernels in found]
        self.sizes[block], self.kernels[block] = min(sized, key=lambda pair: pair[0])

    def _go(
        self, block: Block, kernels: list[Kernel], below: int | None, carried: Iterable[Value]
    ) -> int:
        """Go through kernels in order; note no peaks if `below` is None."""
        last = self._last_uses(block, kernels)
        kept = {self.storage.of(v) for v in carried}
        live: dict[Value, int] = {}
        largest = total = 0
        for at, kernel in enumerate(kernels):
            dying = [v for v in kernel.reads if v in live and last.get(v) == at]
            total += self._allocate(kernel, live, self._reusable(kernel, dying), kept)
            if below is None:
                inside = max((self.sizes[body] for body in kernel.root.bodies), default=0)
            else:
                inside = self._inside(kernel, below + total)
                # The kernels of bodies have noted their own parts.
                part = None if kernel.root.bodies else kernel.part
                self.peaks.note(part, below + total + inside)
            largest = max(largest, total + inside)
            unused = [v for v in kernel.root.outputs if v not in last]
            total -= sum(live.pop(v, 0) for v in (*dying, *unused))
        return largest

    def _allocate(
        self, kernel: Kernel, live: dict[Value, int], reusable: list[Value], kept: set[Value]
    ) -> int:
        """Give memory to what a kernel makes; returns the bytes that are new."""
        new = 0
        for value in kernel.root.outputs:
            size = value.nbytes
            if reusable and live.get(reusable[-1]) == size and value not in kept:
                live[value] = live.pop(reusable.pop())
            else:
                live[value] = size
                new += size
        return new

    def _last_uses(self, block: Block, kernels: list[Kernel]) -> dict[Value, int]:
        last = {v: at for at, kernel in enumerate(kernels) for v in kernel.reads}
        last.update((self.storage.of(v), len(kernels)) for v in block.outputs)
        return last

    def _reusable(self, kernel: Kernel, dying: list[Value]) -> list[Value]:
        """Inputs that the result may overwrite."""
        root = kernel.root
        if root.kind == "loop":
            return [v for v in map(self.storage.of, reversed(root.inputs)) if v in dying]
        if root.kind != "primitive":
            return []
        moved = {
            self.storage.of(v)
            for node in kernel.nodes
            if node.name in _MOVES_ELEMENTS
            for v in node.inputs
        }
        size = root.outputs[0].nbytes
        return [v for v in dying if v not in moved and v.nbytes == size and not _is_flat(v)]

    def _inside(self, kernel: Kernel, live: int) -> int:
        """Bytes that the bodies of a loop or branch need."""
        root = kernel.root
        needed = [self.run(body, live, root.carried) for body in root.bodies]
        return max(needed, default=0)


def _is_flat(value: Value) -> bool:
    """Whether XLA makes a value as a matrix although it has more axes, as for products it does."""
    node = value.producer
    return node is not None and node.name == "dot_general" and not node.facts["batched"]
