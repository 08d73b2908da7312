"""Computation of one slice of tokens after the other.

The scores of all queries, (b, h, q, k), and the logits of all tokens, (tokens, vocabulary), are the
largest tensors of a model. A loop over slices keeps those of one slice, forwards and backwards: its
gradient is a loop of its own, which computes a slice's again.

It is a loop rather than a series of calls, because a compiler that sees all calls may run them
together, and keep what should be computed again. XLA does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import popxl
import popxl_addons as addons
from modelling.layers.module import cast
from popxl import Tensor, TensorSpec, ops

Step = Callable[[Sequence[Tensor], Tensor | None], Tensor]
"""(inputs of a slice, its seed) -> the result, without variables of its own."""


class ChunkLoop(addons.Module):
    """A step for each slice, in a loop.

    Args:
        step: see `Step`.
        slices: number of iterations; must divide the tokens.
        axes: of each input's tokens, along which it is cut; None: each slice reads all of it.
        differentiable: how many of the inputs, the first ones, have gradients.
        out_axis: of the tokens in the results of slices; None: these are added up.
    """

    def __init__(
        self,
        step: Step,
        slices: int,
        axes: Sequence[int | None],
        differentiable: int,
        out_axis: int | None,
    ) -> None:
        super().__init__()
        self.step, self.slices, self.axes = _Step(step), slices, axes
        self.differentiable, self.out_axis = differentiable, out_axis

    def build(self, inputs: list[Tensor], seed: Tensor | None = None) -> Tensor:
        """The results of all slices.

        Args:
            seed: of which each slice has its own.
        """
        self.aux.inputs, self.aux.seed = inputs, seed

        def iteration(
            out: Tensor, start: Tensor, inputs: list[Tensor], seed: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            part = self.step(self._cut(inputs, start), _own(seed, start))
            return self._put(out, start, part, axis), start + self._size(inputs)

        spec, axis = self._of_slice(inputs, seed).graph.outputs[0].spec, self.out_axis
        if axis is not None:
            spec = _resized(spec, spec.shape[axis] * self.slices, axis)
        out, start = ops.init(spec.shape, spec.dtype), popxl.constant(0, popxl.int32)
        graph = popxl.gir().create_graph(iteration, out, start, inputs, seed)
        return ops.repeat(graph, self.slices, out, start, *inputs, *_present(seed))[0]

    def build_grad(self, dy: Tensor) -> list[Tensor]:
        """Gradients of the differentiable inputs: of slices as they are, else sums in float32."""
        inputs, seed = list(self.aux.inputs), self.aux.seed
        step = self._of_slice(inputs, seed)
        wanted = step.graph.inputs[: self.differentiable]
        gradient = addons.recompute_graph(step.autodiff(grads_required=wanted))

        def iteration(
            totals: list[Tensor],
            start: Tensor,
            dy: Tensor,
            inputs: list[Tensor],
            seed: Tensor | None,
        ) -> list[Tensor]:
            given = [*self._cut(inputs, start), *_present(_own(seed, start))]
            if self.out_axis is not None:
                dy = _slice_of(dy, start, dy.shape[self.out_axis] // self.slices, self.out_axis)
            parts = gradient.call(dy, args=_forward_values(gradient, given))
            own = zip(totals, parts, self.axes, strict=False)
            sums = [self._put(t, start, cast(g, t.dtype), axis) for t, g, axis in own]
            return [*sums, start + self._size(inputs)]

        floats = list(zip(inputs[: self.differentiable], self.axes, strict=False))
        totals = [
            ops.init(t.shape, popxl.float32 if axis is None else t.dtype) for t, axis in floats
        ]
        start = popxl.constant(0, popxl.int32)
        graph = popxl.gir().create_graph(iteration, totals, start, dy, inputs, seed)
        sums = ops.repeat(graph, self.slices, *totals, start, dy, *inputs, *_present(seed))
        return [cast(total, t.dtype) for total, (t, _) in zip(sums, floats, strict=False)]

    def _size(self, inputs: Sequence[Tensor]) -> int:
        """Tokens of a slice; the first input is cut."""
        axis = self.axes[0]
        assert axis is not None
        return inputs[0].shape[axis] // self.slices

    def _cut(self, inputs: Sequence[Tensor], start: Tensor) -> list[Tensor]:
        """The inputs of the slice that begins at `start`."""
        size, pairs = self._size(inputs), zip(inputs, self.axes, strict=True)
        return [t if axis is None else _slice_of(t, start, size, axis) for t, axis in pairs]

    def _of_slice(self, inputs: Sequence[Tensor], seed: Tensor | None) -> addons.GraphWithNamedArgs:
        """The step as a graph."""
        size, pairs = self._size(inputs), zip(inputs, self.axes, strict=True)
        specs = [t.spec if axis is None else _resized(t.spec, size, axis) for t, axis in pairs]
        return self.step.create_graph(specs, seed)[1]

    @staticmethod
    def _put(total: Tensor, start: Tensor, part: Tensor, axis: int | None) -> Tensor:
        """Put in a slice's part, or add it if it is one of the whole."""
        if axis is None:
            return total + part
        return ops.dynamic_update(total, start, part, [axis], [part.shape[axis]], no_overlap=True)


class _Step(addons.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self._step = step

    def build(self, inputs: Sequence[Tensor], seed: Tensor | None) -> Tensor:
        return self._step(inputs, seed)


def _slice_of(t: Tensor, start: Tensor, size: int, axis: int) -> Tensor:
    return ops.dynamic_slice(t, start, [axis], [size], no_overlap=True)


def _resized(spec: TensorSpec, size: int, axis: int) -> TensorSpec:
    return TensorSpec((*spec.shape[:axis], size, *spec.shape[axis + 1 :]), spec.dtype)


def _own(seed: Tensor | None, start: Tensor) -> Tensor | None:
    """A seed of the slice that begins at `start`."""
    return None if seed is None else ops.create_random_seed(seed, start)


def _present(seed: Tensor | None) -> list[Tensor]:
    return [] if seed is None else [seed]


def _forward_values(
    gradient: addons.GraphWithNamedArgs, values: Sequence[Tensor]
) -> dict[Tensor, Tensor]:
    """By input of a recomputing gradient graph: the values of the forward graph's inputs."""
    info = gradient.grad_graph_info
    by_input = dict(zip(info.forward_graph.inputs, values, strict=True))
    expected = zip(info.graph.inputs, info.expected_inputs, strict=True)
    return {t: by_input[c.fwd_tensor] for t, c in expected if c.fwd_tensor in by_input}
