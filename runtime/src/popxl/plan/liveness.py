"""How much device memory values take while a program runs.

Each value in memory lives from the kernel that makes it to the last one that reads it. A kernel
may write where one of its inputs was, if that input is read for the last time, element by element.
A loop keeps one array for each value that it carries.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from popxl.plan.fusion import Kernel, kernels_of
from popxl.plan.order import order
from popxl.plan.storage import Storage
from popxl.plan.values import Block, Node, Value

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
    _Run(found).run(block, 0, set())
    return found


@dataclass(frozen=True)
class _Schedule:
    """When a block runs what.

    Attributes:
        kernels: in order.
        made, last: which of them makes a value, and which reads it last.
        stored: values that are made in the memory of the buffers that they fill.
    """

    kernels: list[Kernel]
    made: dict[Value, int]
    last: dict[Value, int]
    stored: set[Value]


@dataclass
class _Run:
    peaks: Peaks
    storage: Storage = field(default_factory=Storage)
    schedules: dict[Block, _Schedule] = field(default_factory=dict)

    def run(self, block: Block, below: int, kept: set[Value]) -> int:
        """Go through a block and note peaks.

        Args:
            below: bytes that are live around it.
            kept: values that leave it in memory that is counted there.

        Returns:
            Bytes of the largest moment inside.
        """
        schedule = self._schedule(block)
        kept = kept | schedule.stored
        live: dict[Value, int] = {}
        largest = total = 0
        for at, kernel in enumerate(schedule.kernels):
            dying = [v for v in kernel.reads if v in live and schedule.last.get(v) == at]
            made = self._allocate(kernel, live, self._reusable(kernel, dying), kept)
            within = made if kernel.root.kind == "branch" else 0  # what its branches make
            total += made - within
            inside = max(self._inside(kernel, below + total, kept), within)
            # The kernels of bodies have noted their own parts.
            part = None if kernel.root.bodies else kernel.part
            self.peaks.note(part, below + total + inside)
            largest = max(largest, total + inside)
            total += within
            unused = [v for v in kernel.root.outputs if v not in schedule.last]
            total -= sum(live.pop(v, 0) for v in (*dying, *unused))
        return largest

    def _schedule(self, block: Block) -> _Schedule:
        if block not in self.schedules:
            kernels = order(kernels_of(block, self.storage), block, self.storage)
            made = {v: at for at, kernel in enumerate(kernels) for v in kernel.root.outputs}
            last = {v: at for at, kernel in enumerate(kernels) for v in kernel.reads}
            last.update((self.storage.of(v), len(kernels)) for v in block.outputs)
            stores = [k.root for k in kernels if k.root.kind == "store" and _fills(k.root)]
            stored = {self.storage.of(node.inputs[0]) for node in stores}
            self.schedules[block] = _Schedule(kernels, made, last, stored)
        return self.schedules[block]

    def _allocate(
        self, kernel: Kernel, live: dict[Value, int], reusable: list[Value], kept: set[Value]
    ) -> int:
        """Give memory to what a kernel makes; returns the bytes that are new."""
        new = 0
        for value in kernel.root.outputs:
            size = value.nbytes
            if value in kept:
                live[value] = 0
            elif reusable and live.get(reusable[-1]) == size:
                live[value] = live.pop(reusable.pop())
            else:
                live[value] = size
                new += size
        return new

    def _reusable(self, kernel: Kernel, dying: list[Value]) -> list[Value]:
        """Inputs that the result may overwrite."""
        if kernel.root.kind == "loop":
            return [v for v in map(self.storage.of, reversed(kernel.root.inputs)) if v in dying]
        return [v for v in dying if v in self._aligned(kernel) and not _is_flat(v)]

    def _aligned(self, kernel: Kernel) -> list[Value]:
        """Inputs of which each element is read only for the same element of the result."""
        if kernel.root.kind != "primitive":
            return []
        moved = {
            self.storage.of(v)
            for node in kernel.nodes
            if node.name in _MOVES_ELEMENTS
            for v in node.inputs
        }
        size = kernel.root.outputs[0].nbytes
        return [v for v in kernel.reads if v not in moved and v.nbytes == size]

    def _inside(self, kernel: Kernel, live: int, kept: set[Value]) -> int:
        """Bytes that the bodies of a loop or branch need."""
        root = kernel.root
        needed = [self.run(body, live, self._kept(root, body, kept)) for body in root.bodies]
        return max(needed, default=0)

    def _kept(self, root: Node, body: Block, around: set[Value]) -> set[Value]:
        """Values that a body makes in memory that is counted around it.

        Args:
            around: the same for the block that the loop or branch is in.
        """
        self._schedule(body)
        if root.kind == "branch":
            results = zip(root.outputs, body.outputs, strict=False)
            return {self.storage.of(out) for result, out in results if result in around}
        pairs = zip(root.carried, body.outputs, strict=False)
        return {self.storage.of(out) for old, out in pairs if self._replaces(body, old, out)}

    def _replaces(self, block: Block, old: Value, out: Value) -> bool:
        """Whether `out`, which leaves a block, can be made where `old` is, which enters it."""
        schedule = self._schedule(block)
        new = self.storage.of(out)  # known once there is a schedule
        if new is old:
            return True
        made, read = schedule.made.get(new, -1), schedule.last.get(old, -1)
        if made < 0 or read != made:
            return read < made
        kernel = schedule.kernels[made]
        if kernel.root.kind == "primitive":
            return old in self._aligned(kernel)
        index = kernel.root.outputs.index(new)
        if kernel.root.kind == "branch":
            return all(self._replaces(b, old, b.outputs[index]) for b in kernel.root.bodies)
        starts = kernel.root.inputs[: len(kernel.root.carried)]
        return index < len(starts) and self.storage.of(starts[index]) is old


def _fills(store: Node) -> bool:
    """Whether a store replaces all of a buffer."""
    buffer = store.facts.get("buffer")
    return buffer is not None and buffer.entries == 1


def _is_flat(value: Value) -> bool:
    """Whether XLA makes a value as a matrix although it has more axes, as for products it does."""
    node = value.producer
    return node is not None and node.name == "dot_general" and not node.facts["batched"]
