"""Single-assignment view of a graph that may modify tensors in place.

Differentiation needs to know which value an op read, and to have that value later. An in-place op
makes a new value of the tensor it overwrites; reading the tensor afterwards reads the new value.
Where a value that a gradient needs would be overwritten, a copy is made before.

Changes that make no such value (through a view, by a called graph, or under a view taken before)
are *hidden*: no gradient may flow through what is read after them.
"""

from __future__ import annotations

import jax.numpy as jnp

from popxl._core.aliases import owners, parents
from popxl._core.op import Op, add_outputs
from popxl._core.opdef import define
from popxl.errors import popart_exception
from popxl.graph import Graph
from popxl.tensor import Tensor

_COPY = define("copy", lambda x: jnp.asarray(x), infer=lambda spec: [spec],
               grad=lambda ctx, op, dy: [dy])  # fmt: skip


class Values:
    """Values read and written by the ops of a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._inputs: dict[Op, list[Tensor]] = {}
        self._current: dict[Tensor, Tensor] = {}  # owner -> its latest value
        self._writes: dict[Tensor, list[Op]] = {}  # owner -> ops that modify it, in order
        self._hiding: dict[Tensor, Op] = {}  # owner -> op whose change of it makes no value
        self._hidden_reads: dict[tuple[Op, int], Op] = {}
        self._hidden_changes: dict[Op, list[Tensor]] = {}
        self._copies: dict[tuple[Tensor, Op], Tensor] = {}
        self._position: dict[Op, int] = {}
        for i, op in enumerate(graph._ops):
            self._position[op] = i
            self._inputs[op] = [self.final(t) for t in op.inputs]
            for index, t in enumerate(op.inputs):
                hidden = self._hidden_change_of(t)
                if hidden is not None:
                    self._hidden_reads[op, index] = hidden
            for index in op.modified_inputs():
                self._modify(op, index)

    def _modify(self, op: Op, index: int) -> None:
        t = op.inputs[index]
        for owner in owners(t):
            self._writes.setdefault(owner, []).append(op)
            if op.inplace == index and self._is_plain(t):
                self._current[owner] = op.outputs[0]
                self._hiding.pop(owner, None)
            else:
                self._hiding[owner] = op
                value = self._current.get(owner, owner)
                self._hidden_changes.setdefault(op, []).append(value)

    def _hidden_change_of(self, t: Tensor) -> Op | None:
        """The op that changed `t` since it was made, if the change makes no value."""
        if self._is_plain(t):
            return self._hiding.get(next(owners(t)))
        assert t._producer is not None
        made = self._position[t._producer]
        later = [w for o in owners(t) for w in self._writes.get(o, ()) if self._position[w] > made]
        return later[-1] if later else None

    def hidden_changes(self, op: Op) -> list[Tensor]:
        """Values that `op` changes without making new ones."""
        return self._hidden_changes.get(op, [])

    def check_read(self, op: Op | None, index: int, t: Tensor) -> None:
        """Raise popart_exception if input `index` of `op` (or, without op, an output `t` of the
        graph) was changed where no gradient can follow."""
        if op is None:
            changed_by = self._hidden_change_of(t)
        else:
            changed_by = self._hidden_reads.get((op, index))
        if changed_by is not None:
            raise self._not_differentiable(changed_by)

    def _not_differentiable(self, op: Op) -> popart_exception:
        return popart_exception(
            f"The graph {self._graph.id} contains a modifying op: `{op}` ({op.location}) changes "
            "an input of the graph, or a tensor through a view, under a view or in a called "
            "graph, and cannot be differentiated; use the variant that is not in place"
        )

    def inputs(self, op: Op) -> list[Tensor]:
        """The values that `op` reads."""
        return self._inputs[op]

    def final(self, t: Tensor) -> Tensor:
        """The value of `t` after the ops seen so far."""
        if self._is_plain(t):
            return self._current.get(next(owners(t)), t)
        return t

    @staticmethod
    def _is_plain(t: Tensor) -> bool:
        """Whether `t` is a whole owner, or an in-place result on one: no view in between."""
        up = parents(t)
        if not up:
            return True
        assert t._producer is not None
        return t._producer.inplace is not None and Values._is_plain(up[0])

    def check_differentiable(self, op: Op) -> None:
        """Raise popart_exception if `op` modifies an input of the graph, or through a view."""
        for index in op.modified_inputs():
            t = op.inputs[index]
            to_input = any(o in self._graph._inputs or o._producer is None for o in owners(t))
            if to_input or op.inplace != index or not self._is_plain(t):
                raise self._not_differentiable(op)

    def preserved(self, t: Tensor, reader: Op | None) -> Tensor:
        """A tensor that at the end of the graph has the value `t` had when `reader` ran."""
        if reader is None or not any(o in self._writes for o in owners(t)):
            return t
        at = self._position[reader] + (t in reader.outputs)
        later = [op for o in owners(t) for op in self._writes.get(o, ())
                 if self._position[op] >= at]  # fmt: skip
        if not later:
            return t
        first = min(later, key=self._position.__getitem__)
        if (t, first) not in self._copies:
            self._copies[t, first] = self._copy_before(t, first)
        return self._copies[t, first]

    def _copy_before(self, t: Tensor, op: Op) -> Tensor:
        with self._graph:
            copy = Op(_COPY, self._graph, [t], {})
            add_outputs(copy, [t.spec], [f"{t.name.rpartition('/')[2]}_kept"])
            self._graph._append_op(copy, before=op)
        return copy.outputs[0]
