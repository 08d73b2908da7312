"""Multi-head attention, between the projections.

Shapes: b samples, h heads on this replica, g of them with keys of their own, q queries, k keys, d
features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import popxl
import popxl_addons as addons
from modelling.layers.attention_step import PLAIN, AttentionStep, Scores
from modelling.layers.dropout import Dropout
from modelling.layers.sliced_attention import SlicedAttention
from popxl import Tensor, ops


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(b, s, h*d) -> (b, s, h, d)."""
    batch, length, features = x.shape
    return x.reshape((batch, length, heads, features // heads))


def heads_first(x: Tensor) -> Tensor:
    """(b, s, h, d) -> (b, h, s, d), and back."""
    return x.transpose((0, 2, 1, 3))


def merge_heads(x: Tensor) -> Tensor:
    """(b, h, s, d) -> (b, s, h*d)."""
    batch, heads, length, features = x.shape
    return heads_first(x).reshape((batch, length, heads * features))


def places_in_order(queries: int, keys: int) -> list[Tensor]:
    """The places, see `Attention.build`, of queries and keys at positions 0, 1, ..."""
    return [popxl.constant(np.arange(n)[None], popxl.int32, "positions") for n in (queries, keys)]


def places_in_texts(starts: Tensor) -> list[Tensor]:
    """The places of samples that hold several texts.

    Args:
        starts: int32 (batch, length), where in its sample each token's text starts.
    """
    length = starts.shape[1]
    return [*places_in_order(length, length), starts, starts]


class Attention(addons.Module):
    """Attention of all queries at once, or of one slice of them after the other.

    Args:
        dropout: of the probabilities.
        scores: how they are made.
        slices: number of slices, see `SlicedAttention`; 1: all at once.
        fused: see `popxl.ops.attention`.
        differentiable: whether a gradient will be wanted.
    """

    def __init__(
        self,
        dropout: Dropout,
        scores: Scores = PLAIN,
        slices: int = 1,
        differentiable: bool = True,
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        self.slices = slices
        self.differentiable = differentiable
        self.fused = fused
        self.step = AttentionStep(dropout, scores, fused, in_order=True)
        self.few = AttentionStep(dropout, scores, fused=False)
        self.sliced = SlicedAttention(self.few, slices)

    def build(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        biases: Sequence[Tensor] = (),
        seed: Tensor | None = None,
        places: Sequence[Tensor] = (),
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Attend from all queries to all keys.

        Args:
            q: (b, h, q, d).
            k, v: (b, g, k, d).
            biases: float32, added to the scores (b, h, q, k); they broadcast. Sinks are the last.
            seed: for dropout.
            places: int32 (b or 1, q) and (b or 1, k) in turn: positions of queries and keys, if
                attention is causal; then the numbers of their segments, if there are several.
                Default: one segment, in order.
            lengths: int32 (b,), the number of keys of each sample; those after it are padding.
                Attention in slices takes no lengths.

        Returns:
            (b, h, q, d).
        """
        biases, places = tuple(biases), tuple(places)
        if self.differentiable:
            q, k, v = map(self._in_memory, (q, k, v))
        if q.shape[2] == 1:  # in generation
            return self.few(q, k, v, biases, places, seed, lengths)
        if self.slices == 1:
            return self.step(q, k, v, biases, places, seed, lengths)
        if self.step.scores.causal and not places:
            places = tuple(places_in_order(q.shape[2], k.shape[2]))
        call = self.call_module(self.sliced, autodiff="auto" if self.differentiable else "none")
        return call(q, k, v, biases, places, seed)[0]

    def _in_memory(self, x: Tensor) -> Tensor:
        """What the gradient reads again, in the order that reads it fastest: cuDNN's kernel takes
        (b, s, h, d), as products make it; a loop over tiles takes (b, h, s, d)."""
        if not self.fused or x.shape[2] == 1:
            return ops.materialise(x)
        return heads_first(ops.materialise(heads_first(x)))
