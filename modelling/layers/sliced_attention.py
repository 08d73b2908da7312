"""Attention for one slice of the queries after the other.

The scores of all queries, (b, h, q, k), are the largest tensors of a layer, and grow with the
square of the sequence. A loop over slices of the queries keeps those of one slice, forwards and
backwards: its gradient is a loop of its own, which computes a slice's scores again.

It is a loop rather than a series of calls, because a compiler that sees all calls may run them
together, and keep what should be computed again. XLA does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import popxl
import popxl_addons as addons
from modelling.layers.attention_step import AttentionStep
from modelling.layers.module import cast
from modelling.layers.slices import forward_values, slice_of, sliced_spec, with_slice
from popxl import Tensor, TensorSpec, ops

QUERIES = 2
"""Axis of the queries in q (b, h, q, d) and in scores (b, h, q, k)."""


class SlicedAttention(addons.Module):
    """Attention as `AttentionStep` computes it, in a loop.

    Args:
        step: attention of one slice.
        slices: number of iterations; must divide the number of queries.
    """

    def __init__(self, step: AttentionStep, slices: int) -> None:
        super().__init__()
        self.step = step
        self.slices = slices

    def build(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        biases: Sequence[Tensor],
        places: Sequence[Tensor],
        seed: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionStep.build`."""
        inputs = _Inputs([q, k, v, *biases], list(places))
        self.aux.biases = len(biases)
        self.aux.inputs, self.aux.seed = inputs.all, seed
        size = self._size(q)

        def iteration(
            out: Tensor, start: Tensor, values: list[Tensor], seed: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            (q, k, v, *biases), places = inputs.cut(values, start, size)
            part = self.step(q, k, v, biases, places, _own(seed, start))
            return with_slice(out, start, part, QUERIES), start + size

        out, start = ops.init(q.shape, v.dtype), popxl.constant(0, popxl.int32)
        graph = popxl.gir().create_graph(iteration, out, start, inputs.all, seed)
        return ops.repeat(graph, self.slices, out, start, *inputs.all, *_present(seed))[0]

    def build_grad(self, dy: Tensor) -> list[Tensor]:
        """Gradients of q, k, v and the biases; the places have none."""
        values, seed = self.aux.inputs, self.aux.seed
        inputs = _Inputs.of(values, self.aux.biases)
        size = self._size(values[0])
        gradient = self._step_gradient(inputs, seed)

        def iteration(
            totals: list[Tensor],
            start: Tensor,
            dy: Tensor,
            values: list[Tensor],
            seed: Tensor | None,
        ) -> list[Tensor]:
            floats, places = inputs.cut(values, start, size)
            given = forward_values(gradient, [*floats, *places, *_present(_own(seed, start))])
            gradients = gradient.call(slice_of(dy, start, size, QUERIES), args=given)
            pairs = zip(totals, gradients, strict=True)
            return [*(_add(total, start, g) for total, g in pairs), start + size]

        moving = zip(inputs.floats, inputs.moving, strict=False)
        totals = [_zeros(t, axis is not None) for t, axis in moving]
        start = popxl.constant(0, popxl.int32)
        graph = popxl.gir().create_graph(iteration, totals, start, dy, values, seed)
        sums = ops.repeat(graph, self.slices, *totals, start, dy, *values, *_present(seed))
        return [cast(total, t.dtype) for total, t in zip(sums, inputs.floats, strict=False)]

    def _size(self, q: Tensor) -> int:
        queries = q.shape[QUERIES]
        if queries % self.slices:
            raise ValueError(f"{queries} queries cannot be cut into {self.slices} equal slices")
        return queries // self.slices

    def _step_gradient(self, inputs: _Inputs, seed: Tensor | None) -> addons.GraphWithNamedArgs:
        """The gradient of one slice. It takes the output's gradient and the step's inputs."""
        (q, k, v, *biases), places = inputs.specs(self._size(inputs.floats[0]))
        _, step = self.step.create_graph(q, k, v, biases, places, seed)
        wanted = step.graph.inputs[: len(inputs.floats)]
        return addons.recompute_graph(step.autodiff(grads_required=wanted))


@dataclass(frozen=True)
class _Inputs:
    """What a step takes.

    Attributes:
        floats: q, k, v and the biases.
        places: see `Attention.build`.
    """

    floats: list[Tensor]
    places: list[Tensor]

    @classmethod
    def of(cls, values: Sequence[Tensor], biases: int) -> _Inputs:
        """From `all` of them."""
        return cls(list(values[: 3 + biases]), list(values[3 + biases :]))

    @property
    def all(self) -> list[Tensor]:
        return [*self.floats, *self.places]

    @property
    def moving(self) -> list[int | None]:
        """The axis of all queries in each input, along which it is cut; None: it has none."""
        q, _, _, *biases = self.floats
        cut = (b.rank > QUERIES and b.shape[QUERIES] == q.shape[QUERIES] for b in biases)
        of_biases = [QUERIES if it else None for it in cut]
        return [QUERIES, None, None, *of_biases, *(None if i % 2 else 1 for i in self._numbers)]

    @property
    def _numbers(self) -> range:
        return range(len(self.places))

    def cut(
        self, values: Sequence[Tensor], start: Tensor, size: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """`floats` and `places` of the slice of queries that begins at `start`."""
        parts = [
            t if axis is None else slice_of(t, start, size, axis)
            for t, axis in zip(values, self.moving, strict=True)
        ]
        return parts[: len(self.floats)], parts[len(self.floats) :]

    def specs(self, size: int) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """Specs of `floats` and `places` of one slice."""
        all_specs = [
            t.spec if axis is None else sliced_spec(t, size, axis)
            for t, axis in zip(self.all, self.moving, strict=True)
        ]
        return all_specs[: len(self.floats)], all_specs[len(self.floats) :]


def _zeros(t: Tensor, moves: bool) -> Tensor:
    """What gradients of `t` go into: slices as they are, sums over the slices in float32."""
    return ops.init(t.shape, t.dtype if moves else popxl.float32)


def _add(total: Tensor, start: Tensor, gradient: Tensor) -> Tensor:
    """Put in a slice's gradient, or add it if it is one of the whole."""
    gradient = cast(gradient, total.dtype)
    whole = gradient.shape == total.shape
    return total + gradient if whole else with_slice(total, start, gradient, QUERIES)


def _own(seed: Tensor | None, start: Tensor) -> Tensor | None:
    """A seed of the slice that begins at `start`."""
    return None if seed is None else ops.create_random_seed(seed, start)


def _present(seed: Tensor | None) -> list[Tensor]:
    return [] if seed is None else [seed]
