"""Single-assignment view of a graph that may modify tensors in place.

Differentiation needs to know which value an op read, and to have that value later. An in-place op
makes a new value of the tensor it overwrites; reading the tensor afterwards reads the new value.
Where a value that a gradient needs would be overwritten, a copy is made before.

Views add steps that are no ops of the graph. A change of a view is written to what it is a view
of, which makes new values there; a view that is read after such a change is taken anew. All of
these are linear, so that their gradients need no values.

A call that changes its inputs makes no value that a gradient could be of: it is *hidden*, and no
gradient may flow through what is read after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from popxl._core.aliases import owners, parents
from popxl._core.op import Op, add_outputs
from popxl._core.opdef import NoGrad, define
from popxl.dtypes import dtype
from popxl.errors import popart_exception
from popxl.graph import Graph
from popxl.tensor import Tensor

_COPY = define("copy", lambda x: jnp.asarray(x), infer=lambda spec: [spec],
               grad=lambda ctx, op, dy: [dy])  # fmt: skip


@dataclass(frozen=True, eq=False)
class Version:
    """A value of a tensor that no op returns: what a step made of it.

    Attributes:
        hidden_by: the op whose change of the tensor makes no value a gradient could be of.
    """

    of: Tensor
    hidden_by: Op | None = None

    @property
    def dtype(self) -> dtype:
        return self.of.dtype


Value = Tensor | Version


@dataclass(frozen=True)
class Step:
    """What a graph does with values.

    Attributes:
        kind: "run": `op` runs; "read": a view, which `op` takes, is read after what it is a view
            of has changed; "write": what changed it is written through the view.
        op: the op; for a read or write, the one that takes the view.
        inputs: the values it reads; a write: those of the tensors viewed, and the one written.
        outputs: the values it makes; a write: those of the tensors viewed.
        writer: the op whose result a write writes.
    """

    kind: Literal["run", "read", "write"]
    op: Op
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    writer: Op | None = None


class Values:
    """Values read and written by the ops of a graph.

    Attributes:
        steps: what the graph does, in order. Asking for the final value of a view may add one.
    """

    def __init__(self, graph: Graph) -> None:
        self.steps: list[Step] = []
        self._graph = graph
        self._current: dict[Tensor, Value] = {}  # owner -> its latest value
        self._views: dict[tuple[Tensor, tuple[Value, ...]], Value] = {}  # of values viewed
        self._writes: dict[Tensor, list[Op]] = {}  # owner -> ops that modify it, in order
        self._copies: dict[tuple[Tensor, Op], Tensor] = {}
        self._position: dict[Op, int] = {}
        for i, op in enumerate(graph._ops):
            self._position[op] = i
            self._run(op)

    # ---- steps ----------------------------------------------------------------------------------
    def _run(self, op: Op) -> None:
        inputs = tuple(map(self.final, op.inputs))
        changed = sorted(op.modified_inputs())
        hidden = {i: Version(op.inputs[i], op) for i in changed if i != op.inplace}
        self.steps.append(Step("run", op, inputs, (*op.outputs, *hidden.values())))
        if op.view:
            self._views[op.outputs[0], inputs] = op.outputs[0]
        for i in changed:
            for owner in owners(op.inputs[i]):
                self._writes.setdefault(owner, []).append(op)
            self._assign(op.inputs[i], hidden[i] if i in hidden else op.outputs[0], op)

    def _assign(self, t: Tensor, value: Value, writer: Op) -> None:
        """Make `value`, which `writer` returns, that of `t` and of all that `t` is a view of."""
        up = parents(t)
        if not up:
            self._current[t] = value
            return
        taker = _producer(t)
        if taker.inplace is not None:
            self._assign(up[0], value, writer)
            return
        old = tuple(map(self.final, up))
        new = tuple(Version(p) for p in up)
        self.steps.append(Step("write", taker, (*old, value), new, writer))
        for p, made in zip(up, new, strict=True):
            self._assign(p, made, writer)
        if len(up) == 1:  # what is read is what was written
            self._views[t, new] = value

    def final(self, t: Tensor) -> Value:
        """The value of `t` after the ops seen so far."""
        up = parents(t)
        if not up:
            return self._current.get(t, t)
        taker = _producer(t)
        if taker.inplace is not None:
            return self.final(up[0])
        viewed = tuple(map(self.final, up))
        if (t, viewed) not in self._views:
            again = Version(t)
            self.steps.append(Step("read", taker, viewed, (again,)))
            self._views[t, viewed] = again
        return self._views[t, viewed]

    # ---- what no gradient can follow ------------------------------------------------------------
    def check_followed(self, value: Value) -> None:
        """Raise popart_exception if `value` is what a hidden change left."""
        if isinstance(value, Version) and value.hidden_by is not None:
            raise self._not_differentiable(value.hidden_by)

    def check_differentiable(self, step: Step) -> None:
        """Raise popart_exception if `step` modifies an input of the graph."""
        if step.kind == "write":
            assert step.writer is not None
            self._check_kept(step.op.outputs[0], step.writer)
        elif step.kind == "run":
            for index in step.op.modified_inputs():
                self._check_kept(step.op.inputs[index], step.op)
                if index != step.op.inplace:
                    raise self._not_differentiable(step.op)

    def _check_kept(self, t: Tensor, op: Op) -> None:
        if any(o in self._graph._inputs or o._producer is None for o in owners(t)):
            raise self._not_differentiable(op)

    def _not_differentiable(self, op: Op) -> popart_exception:
        return popart_exception(
            f"The graph {self._graph.id} contains a modifying op: `{op}` ({op.location}) changes "
            "an input of the graph, or a tensor in a called graph, and cannot be differentiated; "
            "use the variant that is not in place"
        )

    # ---- values that gradients need -------------------------------------------------------------
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


def _producer(t: Tensor) -> Op:
    assert t._producer is not None
    return t._producer


def dependents(values: Values, required: Iterable[Tensor]) -> set[Value]:
    """Values that depend on a required tensor in a differentiable way."""
    found: set[Value] = set(required)
    for step in values.steps:
        if step.kind != "write" and isinstance(step.op.defn.grad, NoGrad):
            continue
        if any(v in found for v in step.inputs):
            found.update(v for v in step.outputs if v.dtype.is_floating_point)
    return found
