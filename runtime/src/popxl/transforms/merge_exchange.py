"""Hints to overlap or merge exchanges with the host; XLA decides which really overlap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from popxl._analysis.alias_analysis import owners
from popxl._ir.op import Op
from popxl.context import get_current_context, in_sequence, io_tiles
from popxl.tensor import Tensor


@contextmanager
def merge_exchange() -> Iterator[None]:
    """Merges the remote and host exchanges created inside (a hint)."""
    with in_sequence(False):
        yield


@contextmanager
def io_tile_exchange(verify_overlap: bool = True) -> Iterator[None]:
    """Overlaps the exchanges created inside, on IO tiles, with compute (a hint).

    Args:
        verify_overlap: check that they can be one exchange.

    Raises:
        RuntimeError: one of the ops depends on another; those that make empty tensors do not count.
    """
    created: list[Op] = []
    context = get_current_context()
    handle = context.register_op_created_hook(created.append)
    try:
        with io_tiles(), merge_exchange():
            yield
    finally:
        context.remove_op_created_hook(handle)
    if verify_overlap:
        _check_independent([op for op in created if op.defn.name != "init"])


def _check_independent(ops: list[Op]) -> None:
    """Raises RuntimeError if an op reads what an earlier op produces or modifies."""
    made: dict[Tensor, Op] = {}
    for op in ops:
        for owner in (o for t in op.inputs for o in owners(t)):
            if owner in made:
                raise RuntimeError(
                    f"`{op}` ({op.location}) depends on `{made[owner]}`, so that the two cannot be "
                    "one exchange: put them into blocks of their own"
                )
        changed = (o for i in op.modified_inputs() for o in owners(op.inputs[i]))
        made.update(dict.fromkeys((*op.outputs, *changed), op))
