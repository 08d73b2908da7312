"""The arithmetic of attention.

Shapes: b samples, h heads on this replica, q queries, k keys, d features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import popxl_addons as addons
from modelling.layers.dropout import Dropout
from popxl import Tensor, ops


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
        return ops.attention(q, k, v, biases, self.scale, *self.dropout.arguments(seed))
