"""The order in which XLA runs the kernels of a block: not that of the program.

XLA on CPU goes from what leaves a block to what it is made of, depth first (`DFSMemoryScheduler` in
hlo_memory_scheduler.cc). Of several inputs, it makes first the one whose making has most values
with several users behind it, then the one with most bytes behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from popxl.plan.fusion import Kernel
from popxl.plan.storage import Storage
from popxl.plan.values import Block, Node, Value


def order(kernels: list[Kernel], block: Block, storage: Storage) -> list[Kernel]:
    """`kernels` in the order in which XLA runs them."""
    needs = _dependencies(kernels, storage)
    roots = _roots(kernels, block, storage)
    weights = _weights(_depth_first(roots, needs, None), needs)
    return _depth_first(roots, needs, lambda k: weights[k])


def _roots(kernels: list[Kernel], block: Block, storage: Storage) -> list[Kernel]:
    """What leaves the block. Stores are first: they read the loop's counter, which leaves first."""
    stores = [k for k in kernels if k.root.kind == "store"]
    made = {v: k for k in kernels for v in k.root.outputs}
    leaving = [made[v] for v in map(storage.of, block.outputs) if v in made]
    return list(dict.fromkeys([*stores, *leaving, *kernels]))


def _depth_first(
    roots: Iterable[Kernel], needs: dict[Kernel, list[Kernel]], key: Callable[[Kernel], Any] | None
) -> list[Kernel]:
    """Post-order: each kernel after what it needs."""
    done: dict[Kernel, None] = {}
    first = sorted(roots, key=key) if key else list(roots)
    stack: list[tuple[Kernel, bool]] = [(k, False) for k in reversed(first)]
    while stack:
        kernel, ready = stack.pop()
        if kernel in done:
            continue
        if ready:
            done[kernel] = None
            continue
        stack.append((kernel, True))
        inputs = sorted(needs[kernel], key=key) if key else needs[kernel]
        stack += [(k, False) for k in reversed(inputs) if k not in done]
    return list(done)


def _weights(
    kernels: list[Kernel], needs: dict[Kernel, list[Kernel]]
) -> dict[Kernel, tuple[int, int]]:
    """How early a kernel comes: less is earlier.

    Of each kernel and all it depends on: users beyond the first, and bytes. Both count twice what
    can be reached in two ways, so XLA limits them: users to the number of instructions, bytes to
    those of all kernels seen so far.

    Args:
        kernels: in post-order of the program, which the second limit depends on.
    """
    readers = Counter(need for kernel in kernels for need in needs[kernel])
    outside = _outside(kernels)
    most_users, most_bytes = len(kernels) + len(outside), 0
    users: dict[Kernel, int] = {}
    size: dict[Kernel, int] = {}
    for kernel in kernels:
        own = _bytes_made(kernel)
        most_bytes += own
        extra = max(readers[kernel] - 1, 0) + sum(outside.get(v, 1) - 1 for v in kernel.reads)
        users[kernel] = min(extra + sum(users[k] for k in needs[kernel]), most_users)
        size[kernel] = min(own + sum(size[k] for k in needs[kernel]), most_bytes)
    return {k: (-users[k], -size[k]) for k in kernels}


def _outside(kernels: list[Kernel]) -> Counter[Value]:
    """Number of users of values that the block does not make."""
    made = {v for k in kernels for v in k.root.outputs}
    return Counter(v for k in kernels for v in k.reads if v not in made)


def _bytes_made(kernel: Kernel) -> int:
    """Bytes of what a kernel returns; XLA counts all of a buffer that a kernel writes to."""
    root = kernel.root
    if root.kind == "loop":  # gives back the memory of what it starts from
        return 0
    if root.kind == "store" and "buffer" in root.facts:
        return root.facts["buffer"].entries * root.inputs[0].nbytes
    return sum(v.nbytes for v in root.outputs)


def _dependencies(kernels: list[Kernel], storage: Storage) -> dict[Kernel, list[Kernel]]:
    """What must run before each kernel: what makes its inputs, and earlier uses of its state."""
    made: dict[Value, Kernel] = {}
    stores: dict[Any, Kernel] = {}
    loads: dict[Any, list[Kernel]] = {}
    needs: dict[Kernel, list[Kernel]] = {}
    for kernel in kernels:
        found = [made[v] for v in kernel.reads if v in made]
        reads, writes = _state(kernel.root)
        for what in (*reads, *writes):
            found += [stores[what]] if what in stores else []
        for what in writes:
            found += loads.pop(what, [])
            stores[what] = kernel
        for what in reads - writes:
            loads.setdefault(what, []).append(kernel)
        needs[kernel] = [k for k in dict.fromkeys(found) if k is not kernel]
        made.update((v, kernel) for v in kernel.root.outputs)
    return needs


def _state(node: Node) -> tuple[set[Any], set[Any]]:
    """Buffers and streams that a node reads and writes, bodies included."""
    reads: set[Any] = set()
    writes: set[Any] = set()
    what = node.facts.get("buffer") or node.facts.get("stream")
    if node.kind == "store":
        writes.add(what)
    elif node.kind == "load":
        (writes if node.name == "host" else reads).add(what)
    elif node.kind == "effect":
        writes.add("world")
    for body in node.bodies:
        for inner in body.nodes:
            more_reads, more_writes = _state(inner)
            reads |= more_reads
            writes |= more_writes
    return reads, writes
