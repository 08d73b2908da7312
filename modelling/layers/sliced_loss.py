"""A loss for one slice of the tokens after the other.

The logits of all tokens of a long text, (tokens, vocabulary) in float32, take more than a device
has. A loop over slices keeps those of one, forwards and backwards: its gradient is a loop of its
own, which computes a slice's logits again (as in `modelling.layers.sliced_attention`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import popxl
import popxl_addons as addons
from modelling.layers.module import cast
from modelling.layers.slices import forward_values, slice_of, sliced_spec, with_slice
from popxl import Tensor, ops

Loss = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]
"""(features, weights, what else is read of the tokens) -> sums over tokens, float32."""

_LENGTH = 1
"""Axis of the tokens in what else is read of them: (batch, length)."""


class SlicedLoss(addons.Module):
    """What a `Loss` computes, in a loop.

    Args:
        loss: of one slice; it makes no variables.
        slices: number of iterations; must divide the number of tokens of a text.
        axis: of a text's tokens in the features.
    """

    def __init__(self, loss: Loss, slices: int, axis: int) -> None:
        super().__init__()
        self.loss, self.slices, self.axis = _Step(loss), slices, axis

    def build(self, x: Tensor, weights: list[Tensor], read: list[Tensor]) -> Tensor:
        """See `Loss`."""
        self.aux.x, self.aux.weights, self.aux.read = x, weights, read

        def iteration(
            total: Tensor, start: Tensor, x: Tensor, weights: list[Tensor], read: list[Tensor]
        ) -> tuple[Tensor, Tensor]:
            x, read = self._cut(x, read, start)
            return total + self.loss(x, weights, read), start + x.shape[self.axis]

        spec = self._step(x, weights, read).graph.outputs[0].spec
        total, start = ops.init(spec.shape, spec.dtype), popxl.constant(0, popxl.int32)
        graph = popxl.gir().create_graph(iteration, total, start, x, weights, read)
        return ops.repeat(graph, self.slices, total, start, x, *weights, *read)[0]

    def build_grad(self, dy: Tensor) -> list[Tensor]:
        """Gradients of the features and the weights; sums over slices are float32."""
        x, weights, read = self.aux.x, list(self.aux.weights), list(self.aux.read)
        gradient = self._slice_gradient(x, weights, read)

        def iteration(
            dx: Tensor,
            totals: list[Tensor],
            start: Tensor,
            dy: Tensor,
            x: Tensor,
            weights: list[Tensor],
            read: list[Tensor],
        ) -> list[Tensor]:
            part, read = self._cut(x, read, start)
            given = forward_values(gradient, [part, *weights, *read])
            own, *others = gradient.call(dy, args=given)
            sums = [t + cast(g, popxl.float32) for t, g in zip(totals, others, strict=True)]
            return [with_slice(dx, start, own, self.axis), *sums, start + part.shape[self.axis]]

        start = popxl.constant(0, popxl.int32)
        totals = [ops.init(w.shape, popxl.float32) for w in weights]
        carried = ops.init(x.shape, x.dtype), totals, start
        graph = popxl.gir().create_graph(iteration, *carried, dy, x, weights, read)
        dx, *sums = ops.repeat(
            graph, self.slices, carried[0], *totals, start, dy, x, *weights, *read
        )
        return [dx, *(cast(t, w.dtype) for t, w in zip(sums, weights, strict=False))]

    def _cut(self, x: Tensor, read: Sequence[Tensor], start: Tensor) -> tuple[Tensor, list[Tensor]]:
        size = x.shape[self.axis] // self.slices
        return slice_of(x, start, size, self.axis), [
            slice_of(t, start, size, _LENGTH) for t in read
        ]

    def _slice_gradient(
        self, x: Tensor, weights: Sequence[Tensor], read: Sequence[Tensor]
    ) -> addons.GraphWithNamedArgs:
        """The gradient of one slice. It takes the loss's gradient and what `loss` takes."""
        step = self._step(x, weights, read)
        wanted = step.graph.inputs[: 1 + len(weights)]
        return addons.recompute_graph(step.autodiff(grads_required=wanted))

    def _step(
        self, x: Tensor, weights: Sequence[Tensor], read: Sequence[Tensor]
    ) -> addons.GraphWithNamedArgs:
        """`loss` of one slice."""
        size = x.shape[self.axis] // self.slices
        specs = [w.spec for w in weights], [sliced_spec(t, size, _LENGTH) for t in read]
        return self.loss.create_graph(sliced_spec(x, size, self.axis), *specs)[1]


class _Step(addons.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self._loss = loss

    def build(self, x: Tensor, weights: Sequence[Tensor], read: Sequence[Tensor]) -> Tensor:
        return self._loss(x, weights, read)
