"""Multi-head attention, between the projections.

Shapes: b samples, h heads on this replica, g of them with keys of their own, q queries, k keys, d
features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import popxl
import popxl_addons as addons
from modelling.layers.dropout import Dropout
from modelling.layers.slices import ChunkLoop
from popxl import Tensor, ops

QUERIES = 2
"""Axis of the queries in q (b, h, q, d) and in scores (b, h, q, k)."""


@dataclass(frozen=True)
class AttentionSpec:
    """How scores are made and which of them count.

    Attributes:
        scale: of the products of queries and keys.
        cap: scores become cap * tanh(scores / cap); None: they stay.
        causal: whether queries see only keys of positions up to their own.
        window: of causal attention, how many positions they see, their own included; None: all.
        sinks: whether the last of the biases are sinks (h,), see `popxl.ops.attention`.
    """

    scale: float = 1.0
    cap: float | None = None
    causal: bool = False
    window: int | None = None
    sinks: bool = False


DEFAULT_ATTENTION = AttentionSpec()


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(b, s, h*d) -> (b, s, h, d)."""
    batch, length, features = x.shape
    return x.reshape((batch, length, heads, features // heads))


def transpose_heads(x: Tensor) -> Tensor:
    """(b, s, h, d) -> (b, h, s, d), and back."""
    return x.transpose((0, 2, 1, 3))


def merge_heads(x: Tensor) -> Tensor:
    """(b, h, s, d) -> (b, s, h*d)."""
    batch, heads, length, features = x.shape
    return transpose_heads(x).reshape((batch, length, heads * features))


def qk_ids_in_order(queries: int, keys: int) -> list[Tensor]:
    """The places, see `Attention.build`, of queries and keys at positions 0, 1, ..."""
    return [popxl.constant(np.arange(n)[None], popxl.int32, "positions") for n in (queries, keys)]


def packed_qk_ids(segment_starts: Tensor) -> list[Tensor]:
    """The places of samples that hold several texts.

    Args:
        starts: int32 (batch, length), where in its sample each token's text starts.
    """
    length = segment_starts.shape[1]
    return [*qk_ids_in_order(length, length), segment_starts, segment_starts]


class Attention(addons.Module):
    """softmax(scores + biases) v, of all queries at once, or of one slice of them after the other.

    Scores and softmax are in float32, whatever the dtype of q, k and v: scores that are not
    scaled, as T5's, need it.

    Args:
        dropout: of the probabilities.
        scores: how they are made.
        slices: number of slices of the queries, see `ChunkLoop`; 1: all at once.
        fused: see `popxl.ops.attention`.
        differentiable: whether a gradient will be wanted.
    """

    def __init__(
        self,
        dropout: Dropout,
        scores: AttentionSpec = DEFAULT_ATTENTION,
        slices: int = 1,
        differentiable: bool = True,
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        self.dropout, self.scores, self.slices = dropout, scores, slices
        self.differentiable, self.fused = differentiable, fused

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
        if self.differentiable:
            q, k, v = map(self._in_memory, (q, k, v))
        floats, queries = [q, k, v, *biases], q.shape[QUERIES]
        if queries == 1:  # in generation
            return self._attend(floats, places, seed, lengths, fused=False)
        if self.slices == 1:
            return self._attend(floats, places, seed, lengths, self.fused, in_order=True)
        if queries % self.slices:
            raise ValueError(f"{queries} queries cannot be cut into {self.slices} equal slices")
        if self.scores.causal and not places:
            places = qk_ids_in_order(queries, k.shape[2])

        def of_slice(inputs: Sequence[Tensor], seed: Tensor | None) -> Tensor:
            own, places = inputs[: len(floats)], inputs[len(floats) :]
            return self._attend(own, places, seed, fused=False)

        cut = [b.rank > QUERIES and b.shape[QUERIES] == queries for b in biases]
        of_places = (None if number % 2 else 1 for number in range(len(places)))
        axes = [QUERIES, None, None, *(QUERIES if it else None for it in cut), *of_places]
        sliced = ChunkLoop(of_slice, self.slices, axes, len(floats), QUERIES)
        call = self.call_module(sliced, autodiff="auto" if self.differentiable else "none")
        return call([*floats, *places], seed)[0]

    def _attend(
        self,
        floats: Sequence[Tensor],
        places: Sequence[Tensor],
        seed: Tensor | None,
        lengths: Tensor | None = None,
        fused: bool | None = None,
        in_order: bool = False,
    ) -> Tensor:
        """From some queries to all keys.

        Args:
            floats: q, k, v and the biases.
            in_order: whether places with segments are 0, 1, ...: kernels know without being told.
        """
        (q, k, v, *biases), scores = floats, self.scores
        pairs = [(places[i], places[i + 1]) for i in range(0, len(places), 2)]
        positions = pairs.pop(0) if pairs and scores.causal else None
        segments = pairs.pop() if pairs else None
        sinks = biases.pop() if scores.sinks else None
        seed, probability = self.dropout.arguments(seed)
        return ops.attention(
            q,
            k,
            v,
            biases,
            scores.scale,
            seed,
            probability,
            causal=scores.causal,
            window=scores.window,
            cap=scores.cap,
            positions=None if segments is not None and in_order else positions,
            segments=segments,
            lengths=lengths,
            sinks=sinks,
            fused=fused,
        )

    def _in_memory(self, x: Tensor) -> Tensor:
        """What the gradient reads again, in the order that reads it fastest: cuDNN's kernel takes
        (b, s, h, d), as products make it; a loop over tiles takes (b, h, s, d)."""
        if not self.fused or x.shape[2] == 1:
            return ops.materialise(x)
        return transpose_heads(ops.materialise(transpose_heads(x)))
