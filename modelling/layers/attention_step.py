"""The arithmetic of attention.

Shapes: b samples, h heads on this replica, g of them with keys of their own, q queries, k keys, d
features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import popxl_addons as addons
from modelling.layers.dropout import Dropout
from popxl import Tensor, ops


@dataclass(frozen=True)
class Scores:
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


PLAIN = Scores()


class AttentionStep(addons.Module):
    """softmax(scores + biases) v, for some queries and all keys.

    Scores and softmax are in float32, whatever the dtype of q, k and v: scores that are not
    scaled, as T5's, need it.
    """

    def __init__(
        self,
        dropout: Dropout,
        scores: Scores,
        fused: bool | None = None,
        in_order: bool = False,
    ) -> None:
        """
        Args:
            dropout: of the probabilities.
            fused: see `popxl.ops.attention`.
            in_order: whether places with segments are 0, 1, ...: kernels know without being told.
        """
        super().__init__()
        self.fused, self.in_order = fused, in_order
        self.dropout = dropout
        self.scores = scores

    def build(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        biases: Sequence[Tensor],
        places: Sequence[Tensor],
        seed: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """q: (b, h, q, d), k and v: (b, g, k, d), biases broadcast to (b, h, q, k) -> as q.

        Args:
            biases, places, lengths: see `Attention.build`.
        """
        scores, (at, texts) = self.scores, self.pairs(places)
        added = list(biases)
        sinks = added.pop() if scores.sinks else None
        seed, probability = self.dropout.arguments(seed)
        return ops.attention(
            q,
            k,
            v,
            added,
            scores.scale,
            seed,
            probability,
            causal=scores.causal,
            window=scores.window,
            cap=scores.cap,
            positions=at,
            segments=texts,
            lengths=lengths,
            sinks=sinks,
            fused=self.fused,
        )

    def pairs(
        self, places: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
        """Positions and segments among the places of queries and keys."""
        given = [(places[i], places[i + 1]) for i in range(0, len(places), 2)]
        at = given.pop(0) if given and self.scores.causal else None
        texts = given.pop() if given else None
        return None if texts is not None and self.in_order else at, texts
