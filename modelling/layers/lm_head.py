"""The language-model head, with the vocabulary cut over tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import popxl
from modelling.layers.layer import Layer, cast
from modelling.layers.low_rank_vocabulary import VocabularyAdapter
from modelling.layers.masking import MASKED
from modelling.layers.parallel import Groups
from modelling.layers.token_rows import TokenRows
from popxl import Tensor, ops
from popxl_addons.fp8 import matrix_product


class LMHead(Layer):
    """Logits of the next token.

    Variables, unless the weight is the embedding's: `weight` (hidden, ceil(vocabulary /
    tensor_parallel)), sharded, and `bias` (ceil(vocabulary / tensor_parallel),) if there is one; in
    FP8 those of `product`; those of `adapters`, if it is given some (`adapt`).

    Args:
        cap: logits become cap * tanh(logits / cap); None: they stay.
        trained: tokens whose part of the weight is trained beside the others'.
    """

    adapters: VocabularyAdapter | None = None

    def __init__(
        self,
        vocabulary: int,
        groups: Groups,
        bias: bool = False,
        cap: float | None = None,
        trained: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.rows = TokenRows(trained, groups) if trained else None
        self.vocabulary = vocabulary
        self.groups = groups
        self.bias = bias
        self.cap = cap
        self.product = matrix_product()

    def build(self, x: Tensor, table: Sequence[Tensor] | None = None) -> Tensor:
        """x: (..., hidden) -> float32 logits (..., ceil(vocabulary / tensor_parallel)).

        Each replica gets the logits of its part of the vocabulary; those of padding, after the
        end of the vocabulary, are so low that no softmax or argmax sees them.

        Args:
            table: the weight of the embedding, if it is the head's too: its transpose; and A and B
                of its adapter.
        """
        return self.of(self.groups.copy_to_tp(x), *self.weights(x, table))

    def weights(self, x: Tensor, table: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The matrix, the bias if there is one, and A and B of an adapter; see `build`."""
        groups, shard = self.groups, self.groups.vocabulary_shard(self.vocabulary)
        if table is None:
            weight = self.weight("weight", (x.shape[-1], shard), x.dtype, groups.sharded)
            weight = weight if self.rows is None else self.rows(weight, transposed=True)
            low_rank = self.adapters.matrices(weight) if self.adapters else []
        else:
            weight, *low_rank = (t.transpose() for t in table)
            low_rank.reverse()
        bias = [self.weight("bias", (shard,), x.dtype, groups.sharded)] if self.bias else []
        return [weight, *bias, *low_rank]

    def of(self, x: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
        """See `build`; `x` is on all replicas of a tensor-parallel group.

        Args:
            others: what `weights` gives after the matrix.
        """
        shard = weight.shape[-1]
        bias, low_rank = (others[:1], others[1:]) if self.bias else ((), others)
        wide = cast(bias[0], popxl.float32) if bias else None
        logits = self.product(x, weight, wide, popxl.float32)
        if low_rank:
            a, b = low_rank
            logits = logits + cast(x, popxl.float32) @ a @ b
        if self.cap is not None:
            logits = ops.tanh(logits / self.cap) * self.cap
        padded = shard * self.groups.tensor_parallel
        if padded == self.vocabulary:
            return logits
        low = np.where(np.arange(padded) < self.vocabulary, 0, MASKED)
        mask = popxl.constant(low, popxl.float32, "vocabulary_padding")
        own = ops.collectives.replicated_slice(mask, 0, self.groups.tp)
        return logits + own.reshape((shard,))
