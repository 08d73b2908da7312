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

    def note(self, part: str, live: int) -> None:
        self.total = max(self.total, live)
        self.parts[part] = max(self.parts[part], live)


def peaks(block: Block) -> Peaks:
    """Bytes of values that the program makes; arguments and constants are not counted."""
    found = Peaks()
    _Run(found, Storage()).run(block, 0, ())
    return found


@dataclass
class _Run:
    peaks: Peaks
    storage: Storage

    def run(self, block: Block, below: int, given: Iterable[Value]) -> int:
        """Go through a block.

        Args:
            below: bytes that are live around it.
            given: values whose memory is the caller's, to be left with the block's outputs.

        Returns:
            Bytes of the largest moment inside.
        """
        kernels = kernels_of(block, self.storage)
        last = self._last_uses(block, kernels)
        free = {self.storage.of(v) for v in given}
        live: dict[Value, int] = {}
        largest = total = 0
        for at, kernel in enumerate(kernels):
            dying = [v for v in kernel.reads if v in live and last.get(v) == at]
            reused = self._reusable(kernel, dying)
            for value in kernel.root.outputs:
                size = value.nbytes
                if reused and live.get(reused[-1]) == size and value not in free:
                    live[value] = live.pop(reused.pop())
                else:
                    live[value] = size
                    total += size
            inside = self._inside(kernel, below + total)
            self.peaks.note(kernel.part, below + total + inside)
            largest = max(largest, total + inside)
            for value in dying:
                total -= live.pop(value, 0)
            for value in kernel.root.outputs:
                if value not in last:
                    total -= live.pop(value, 0)
        return largest

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
        return [v for v in dying if v not in moved and v.nbytes == root.outputs[0].nbytes]

    def _inside(self, kernel: Kernel, live: int) -> int:
        """Bytes that the bodies of a loop or branch need."""
        root = kernel.root
        needed = [self.run(body, live, root.carried) for body in root.bodies]
        return max(needed, default=0)
