"""The order in which XLA runs the kernels of a block: not that of the program.

XLA takes, of several orders, the one that needs least memory (hlo_memory_scheduler.cc). Two of them
go from what leaves the block to what it is made of, depth first; they differ in which input they
visit first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from popxl.plan.fusion import Kernel, Storage
from popxl.plan.values import Block, Node, Value


def orders(kernels: list[Kernel], block: Block, storage: Storage) -> Iterator[list[Kernel]]:
    """The orders that XLA may choose."""
    needs = _dependencies(kernels, storage)
    users, size = _weights(kernels, needs)
    roots = _roots(kernels, block, storage)
    yield _depth_first(roots, needs, lambda k: (-users[k], -size[k]))
    yield _depth_first(roots, needs, None)


def _roots(kernels: list[Kernel], block: Block, storage: Storage) -> list[Kernel]:
    made = {v: k for k in kernels for v in k.root.outputs}
    leaving = [made[v] for v in map(storage.of, block.outputs) if v in made]
    return list(dict.fromkeys([*leaving, *kernels]))


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
) -> tuple[dict[Kernel, int], dict[Kernel, int]]:
    """Of each kernel and all it depends on: users beyond the first, and bytes."""
    readers: dict[Kernel, int] = dict.fromkeys(kernels, 0)
    for kernel in kernels:
        for need in needs[kernel]:
            readers[need] += 1
    users: dict[Kernel, int] = {}
    size: dict[Kernel, int] = {}
    most_users = most_bytes = 0
    for kernel in kernels:
        own = sum(v.nbytes for v in kernel.root.outputs)
        most_users, most_bytes = most_users + 1, most_bytes + own
        extra = max(readers[kernel] - 1, 0)
        users[kernel] = min(extra + sum(users[k] for k in needs[kernel]), most_users)
        size[kernel] = min(own + sum(size[k] for k in needs[kernel]), most_bytes)
    return users, size


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
