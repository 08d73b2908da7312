"""Multi-head attention, between the projections.

Shapes: b samples, h heads on this replica, q queries, k keys, d features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import popxl
import popxl_addons as addons
from modelling.layers.dropout import Dropout
from modelling.layers.layer import cast
from popxl import Tensor, ops


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(b, s, h*d) -> (b, h, s, d)."""
    batch, length, features = x.shape
    return x.reshape((batch, length, heads, features // heads)).transpose((0, 2, 1, 3))


def merge_heads(x: Tensor) -> Tensor:
    """(b, h, s, d) -> (b, s, h*d)."""
    batch, heads, length, features = x.shape
    return x.transpose((0, 2, 1, 3)).reshape((batch, length, heads * features))


class AttentionStep(addons.Module):
    """softmax(q kᵀ * scale + biases) v, for some queries and all keys.

    Scores and softmax are in float32, whatever the dtype of q, k and v: scores that are not
    scaled, as T5's, need it.
    """

    def __init__(self, dropout: Dropout, scale: float) -> None:
        """Args: `dropout`: of the probabilities; `scale`: of the scores."""
        super().__init__()
        self.dropout = dropout
        self.scale = scale

    def build(
        self, q: Tensor, k: Tensor, v: Tensor, biases: Sequence[Tensor], seed: Tensor | None = None
    ) -> Tensor:
        """q: (b, h, q, d), k and v: (b, h, k, d), biases broadcast to (b, h, q, k) -> as q."""
        scores = ops.matmul(q, k.transpose((0, 1, 3, 2)), output_type=popxl.float32)
        if self.scale != 1:
            scores = scores * self.scale
        for bias in biases:
            scores = scores + bias
        probabilities = cast(ops.softmax(scores, axis=-1), v.dtype)
        return self.dropout(probabilities, seed) @ v


class Attention(addons.Module):
    """Attention, computed for all queries at once or for one slice of them after the other.

    The scores, (b, h, q, k), are the largest tensors of a layer. With `slices` > 1 those of one
    slice exist at a time: one graph is called for each slice, and its gradient recomputes it.

    Args:
        dropout: of the probabilities.
        scale: of the scores.
        slices: number of calls; must divide the number of queries.
        differentiable: whether a gradient will be wanted.
    """

    def __init__(
        self,
        dropout: Dropout,
        scale: float = 1.0,
        slices: int = 1,
        differentiable: bool = True,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.slices = slices
        self.differentiable = differentiable
        self.step = AttentionStep(dropout, scale)

    def build(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        biases: Sequence[Tensor] = (),
        seed: Tensor | None = None,
    ) -> Tensor:
        """Attend from all queries to all keys.

        Args:
            q: (b, h, q, d).
            k, v: (b, h, k, d).
            biases: float32, added to the scores (b, h, q, k); they broadcast.
            seed: for dropout.

        Returns:
            (b, h, q, d).
        """
        biases = tuple(biases)
        if self.slices == 1:
            return self.step(q, k, v, biases, seed)
        cut = [_slices_of(bias, self.slices, q.shape[2]) for bias in biases]
        seeds = self.dropout.seeds(seed, self.slices)
        queries = ops.split(q, self.slices, axis=2)
        graph = self._step_graph(queries[0], k, v, tuple(b[0] for b in cut), seeds[0])
        outputs = []
        for i, part in enumerate(queries):
            inputs = [part, k, v, *(b[i] for b in cut), seeds[i]]
            outputs.append(graph.call(*(t for t in inputs if t is not None))[0])
        return ops.concat(outputs, axis=2)

    def _step_graph(self, *args: Tensor | tuple[Tensor, ...] | None) -> addons.GraphWithNamedArgs:
        _, graph = self.step.create_graph(*args)
        if self.differentiable:
            grad = addons.recompute_graph(graph.autodiff())
            self.called_graphs_grad_info[graph.graph] = grad.grad_graph_info
        return graph


def _slices_of(bias: Tensor, count: int, queries: int) -> list[Tensor]:
    """A bias for each slice of the queries."""
    if bias.shape[2] == queries:
        return ops.split(bias, count, axis=2)
    return [bias] * count
