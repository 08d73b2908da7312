"""The language-model head, with the vocabulary sharded over tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

import popxl
from modelling.layers.lora import TrainableTokenRows, VocabularyAdapter
from modelling.layers.masking import MASK_VALUE
from modelling.layers.module import Module, cast, fused_parameter
from modelling.weights.mapping import Weight
from popxl import Tensor, ops
from popxl_addons.fp8 import matrix_product

Bias = Literal["trained", "buffer"]


class LMHead(Module):
    """Logits of the next token.

    Some rows may be trained beside the others, and it may be given an adapter.

    Args:
        std: of the initial weights.
        tied: whether its weight is the embedding's, which `build` is then given.
        bias: a trained one of the logits, or a buffer; None: there is none.
        cap: logits become cap * tanh(logits / cap); None: they stay.
    """

    adapters: VocabularyAdapter | None = None

    def __init__(
        self, std: float, tied: bool = False, bias: Bias | None = None, cap: float | None = None
    ) -> None:
        super().__init__("")
        config, model = self.config, self.config.model
        rows = () if tied or not config.adapter.trainable_tokens_head else config.trained_tokens
        self.rows = TrainableTokenRows(rows) if rows else None
        self.vocabulary = model.vocab_size
        self.has_bias, self.cap, self.product = bias is not None, cap, matrix_product()
        if not tied:
            weight = Weight("lm_head.weight", (self.vocabulary, model.hidden_size), std)
            self.weight = fused_parameter([weight], 1, transposed=True)
        if bias == "trained":
            self.bias = fused_parameter([Weight("lm_head.bias", (self.vocabulary,), 0.0)], 0)
        elif bias == "buffer":
            buffer = Weight("final_logits_bias", (1, self.vocabulary), 0.0)
            self.bias = fused_parameter([buffer], 1, is_buffer=True)

    def build(self, x: Tensor, embedding_weights: Sequence[Tensor] | None = None) -> Tensor:
        """x: (..., hidden) -> float32 logits (..., ceil(vocabulary / tensor_parallel)).

        Each replica gets the logits of its part of the vocabulary; those of padding, after the
        end of the vocabulary, are so low that no softmax or argmax sees them.

        Args:
            table: the weight of the embedding, if it is the head's too: its transpose; and A and B
                of its adapter.
        """
        return self.compute_logits(self.groups.copy_to_tp(x), *self.weights(embedding_weights))

    def weights(self, embedding_weights: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The matrix, the bias if there is one, and A and B of an adapter; see `build`."""
        if embedding_weights is None:
            weight = self.weight if self.rows is None else self.rows(self.weight, transposed=True)
            low_rank = [*self.adapters()] if self.adapters else []
        else:
            weight, *low_rank = (t.transpose() for t in embedding_weights)
            low_rank.reverse()
        bias = [self.bias.reshape((-1,))] if self.has_bias else []
        return [weight, *bias, *low_rank]

    def compute_logits(self, x: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
        """See `build`; `x` is on all replicas of a tensor-parallel group.

        Args:
            others: what `weights` gives after the matrix.
        """
        shard = weight.shape[-1]
        bias, low_rank = (others[:1], others[1:]) if self.has_bias else ((), others)
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
        low = np.where(np.arange(padded) < self.vocabulary, 0, MASK_VALUE)
        mask = popxl.constant(low, popxl.float32, "vocabulary_padding")
        own = ops.collectives.replicated_slice(mask, 0, self.groups.tp)
        return logits + own.reshape((shard,))
