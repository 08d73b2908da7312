"""Attention for one slice of the queries after the other.

The scores of all queries, (b, h, q, k), are the largest tensors of a layer, and grow with the
square of the sequence. A loop over slices of the queries keeps those of one slice, forwards and
backwards: its gradient is a loop of its own, which computes a slice's scores again.

It is a loop, and not one call after the other, because a compiler that sees all calls is free to
run them together, and to keep what it was meant to compute again: XLA does.
"""

from __future__ import annotations

from collections.abc import Sequence

import popxl
import popxl_addons as addons
from modelling.layers.attention_step import AttentionStep
from modelling.layers.layer import cast
from popxl import Tensor, TensorSpec, ops

QUERIES = 2
"""Axis of the queries in q (b, h, q, d) and in scores (b, h, q, k)."""


class SlicedAttention(addons.Module):
    """The same as `AttentionStep`, in a loop.

    Args:
        step: attention of one slice.
        slices: number of iterations; must divide the number of queries.
    """

    def __init__(self, step: AttentionStep, slices: int) -> None:
        super().__init__()
        self.step = step
        self.slices = slices

    def build(
        self, q: Tensor, k: Tensor, v: Tensor, biases: Sequence[Tensor], seed: Tensor | None = None
    ) -> Tensor:
        """See `AttentionStep.build`."""
        inputs, size = [q, k, v, *biases], self._size(q)
        self.aux.inputs, self.aux.seed = inputs, seed

        def iteration(
            out: Tensor, start: Tensor, inputs: list[Tensor], seed: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            q, k, v, *biases = _cut(inputs, start, size)
            return _put(out, start, self.step(q, k, v, biases, _own(seed, start))), start + size

        out, start = ops.init(q.shape, v.dtype), popxl.constant(0, popxl.int32)
        graph = popxl.gir().create_graph(iteration, out, start, inputs, seed)
        return ops.repeat(graph, self.slices, out, start, *inputs, *_present(seed))[0]

    def build_grad(self, dy: Tensor) -> list[Tensor]:
        """Gradients of q, k, v and the biases."""
        inputs, seed = self.aux.inputs, self.aux.seed
        size = self._size(inputs[0])
        gradient = self._step_gradient(inputs, seed)

        def iteration(
            totals: list[Tensor],
            start: Tensor,
            dy: Tensor,
            inputs: list[Tensor],
            seed: Tensor | None,
        ) -> list[Tensor]:
            values = [*_cut(inputs, start, size), *_present(_own(seed, start))]
            found = gradient.call(_slice(dy, start, size), args=_forward_values(gradient, values))
            pairs = zip(totals, found, strict=True)
            return [*(_add(total, start, g) for total, g in pairs), start + size]

        totals = [_zeros(t, moves) for t, moves in zip(inputs, _moving(inputs), strict=True)]
        start = popxl.constant(0, popxl.int32)
        graph = popxl.gir().create_graph(iteration, totals, start, dy, inputs, seed)
        sums = ops.repeat(graph, self.slices, *totals, start, dy, *inputs, *_present(seed))
        return [cast(total, t.dtype) for total, t in zip(sums, inputs, strict=False)]

    def _size(self, q: Tensor) -> int:
        queries = q.shape[QUERIES]
        if queries % self.slices:
            raise ValueError(f"{queries} queries cannot be cut into {self.slices} equal slices")
        return queries // self.slices

    def _step_gradient(
        self, inputs: list[Tensor], seed: Tensor | None
    ) -> addons.GraphWithNamedArgs:
        """The gradient of one slice. It takes the output's gradient and the step's inputs."""
        size = self._size(inputs[0])
        q, k, v, *biases = (
            TensorSpec((*t.shape[:QUERIES], size, *t.shape[QUERIES + 1 :]), t.dtype)
            if moves
            else t.spec
            for t, moves in zip(inputs, _moving(inputs), strict=True)
        )
        _, step = self.step.create_graph(q, k, v, biases, seed)
        wanted = step.graph.inputs[: len(inputs)]
        return addons.recompute_graph(step.autodiff(grads_required=wanted))


def _forward_values(
    gradient: addons.GraphWithNamedArgs, values: Sequence[Tensor]
) -> dict[Tensor, Tensor]:
    """By input of a recomputing gradient graph: the values of the forward graph's inputs."""
    info = gradient.grad_graph_info
    by_input = dict(zip(info.forward_graph.inputs, values, strict=True))
    expected = zip(info.graph.inputs, info.expected_inputs, strict=True)
    return {t: by_input[c.fwd_tensor] for t, c in expected if c.fwd_tensor in by_input}


def _moving(inputs: Sequence[Tensor]) -> list[bool]:
    """Which of q, k, v and the biases are cut: those with an axis of all queries."""
    q, _, _, *biases = inputs
    return [True, False, False, *(b.shape[QUERIES] == q.shape[QUERIES] for b in biases)]


def _cut(inputs: Sequence[Tensor], start: Tensor, size: int) -> list[Tensor]:
    """q, k, v and the biases for the slice of queries that begins at `start`."""
    pairs = zip(inputs, _moving(inputs), strict=True)
    return [_slice(t, start, size) if moves else t for t, moves in pairs]


def _slice(t: Tensor, start: Tensor, size: int) -> Tensor:
    return ops.dynamic_slice(t, start, [QUERIES], [size], no_overlap=True)


def _put(t: Tensor, start: Tensor, part: Tensor) -> Tensor:
    return ops.dynamic_update(t, start, part, [QUERIES], [part.shape[QUERIES]], no_overlap=True)


def _zeros(t: Tensor, moves: bool) -> Tensor:
    """What gradients of `t` go into: slices as they are, sums over the slices in float32."""
    return ops.init(t.shape, t.dtype if moves else popxl.float32)


def _add(total: Tensor, start: Tensor, gradient: Tensor) -> Tensor:
    """Put in a slice's gradient, or add it if it is one of the whole."""
    gradient = cast(gradient, total.dtype)
    whole = gradient.shape == total.shape
    return total + gradient if whole else _put(total, start, gradient)


def _own(seed: Tensor | None, start: Tensor) -> Tensor | None:
    """A seed of the slice that begins at `start`."""
    return None if seed is None else ops.create_random_seed(seed, start)


def _present(seed: Tensor | None) -> list[Tensor]:
    return [] if seed is None else [seed]
