"""The order of loops and of the changes that come after them, which XLA for CPU does not keep.

With the analysis that keeps loops over buffers free of copies (see `_lower/compile.py`), XLA may
overwrite an array in place before a loop that reads it has run, if what is written does not depend
on the loop. So loops carry a number that is 0, but that only a run knows, when they have run; each
takes it over from the one before. What changes an array that a loop has read is made to depend on
it: an entry of a buffer by the index it is stored at, a variable by a choice between the new value
and the old one, which XLA makes where it computes the new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from popxl.graph import Graph
    from popxl.remote_buffer import RemoteBuffer


def has_loops(graph: Graph) -> bool:
    """Whether an op of `graph` runs others in a loop or branch."""
    return any(op.called_graphs() and op.defn.name != "call" for op in graph._ops)


class Loops:
    """What the loops (and branches) of a trace so far have read, and the number that they leave.

    Args:
        zero: an int32 scalar that is 0 at run time but unknown to the compiler; None: the platform
            keeps the order by itself, and nothing is done.

    Attributes:
        number: int32 scalar 0, known when all loops so far have run; None without `zero`.
    """

    def __init__(self, zero: Any = None) -> None:
        self.zero = self.number = zero
        self._change = False
        self._read: dict[int, jax.Array] = {}  # by identity; they are kept, so that it stays theirs
        self._buffers: set[RemoteBuffer] = set()
        self._behind: dict[int, tuple[jax.Array, Any]] = {}  # arrays, and the number they wait for

    # ---- loops ----------------------------------------------------------------------------------
    def will_change(
        self, arrays: Iterable[jax.Array], buffers: Iterable[RemoteBuffer] = ()
    ) -> None:
        """Note that the next loop changes what loops before it may have read."""
        found = any(map(self.has_read, arrays)) or not self._buffers.isdisjoint(buffers)
        self._change = self._change or found

    @property
    def kept(self) -> Any:
        """What the program has to return for its loops to keep their order: XLA removes numbers
        that nobody uses. 0 if no loop changes what others have read."""
        return self.number if self._change else 0

    @contextmanager
    def entered(self, number: Any) -> Iterator[None]:
        """Trace a body that gets `number`; afterwards the number is as before."""
        kept, self.number = self.number, number
        try:
            yield
        finally:
            self.number = kept

    def passed(self, backwards: bool = False) -> Any:
        """The number at the end of an iteration or branch, which is not that of its start.

        Args:
            backwards: as one of two branches has to; XLA takes out what both have in common.
        """
        if self.number is None:
            return None
        return self.number - self.zero if backwards else self.number + self.zero

    def left(
        self,
        number: Any,
        read: Iterable[jax.Array],
        buffers: Iterable[RemoteBuffer] = (),
        changed: Iterable[jax.Array] = (),
    ) -> None:
        """Note a loop that leaves `number`.

        Args:
            read: arrays that it has read, or started from.
            buffers: buffers that it has read.
            changed: its results that replace arrays of its caller.
        """
        self.number = number
        if number is None:
            return
        self._buffers.update(buffers)
        self._read.update((id(x), x) for x in read)
        for x in changed:
            self.replaced(x)

    # ---- changes --------------------------------------------------------------------------------
    def index_behind(self, buffer: RemoteBuffer, at: Any) -> Any:
        """Index of an entry to be stored, known when the loops that read the buffer have run."""
        if buffer not in self._buffers:
            return at
        return jnp.asarray(at).astype(jnp.int32) + self.number

    def has_read(self, array: jax.Array | None) -> bool:
        """Whether a loop has read what an owner holds, or held before."""
        return id(array) in self._read

    def value_behind(self, new: jax.Array, old: jax.Array) -> jax.Array:
        """The value `new`, which is to replace `old`, known when the loops so far have run."""
        made, number = self._behind.get(id(new), (None, None))
        if made is not None and number is self.number:
            return new
        return jnp.where(self.number == 0, new, old)

    def replaced(self, array: jax.Array) -> None:
        """Note that `array`, made of a value that is known when the loops so far have run, replaces
        one that was read: what replaces it in turn may be stored in the same memory."""
        self._read[id(array)] = array
        self._behind[id(array)] = array, self.number
