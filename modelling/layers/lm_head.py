"""The language-model head, with the vocabulary sharded over tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

import popxl
from modelling.layers.lora import TrainableTokenRows, VocabularyAdapter
from modelling.layers.masking import MASK_VALUE
from modelling.layers.module import Module, cast_if_needed, fused_parameter
from modelling.weights.weight_mapping import Weight
from popxl import Tensor, ops
from popxl_addons.matrix_product import create_matrix_product

Bias = Literal["trained", "buffer"]


class LMHead(Module):
    """Logits of the next token, vocabulary-parallel.

    Rows of some tokens may be trained separately, and it may have an adapter.

    In training the logits are rounded to the precision of the activations, in which they cross
    memory; all that follows is float32. In evaluation and generation they are float32.

    Args:
        std: of the initial weights.
        tied: True if its weight is the embedding's, which `build` then takes.
        bias: of the logits: a trained one, or a buffer; None: none.
        softcap: logits become softcap * tanh(logits / softcap); None: no cap.
        hf_linear: Hugging Face's name of the linear layer.
    """

    adapters: VocabularyAdapter | None = None

    def __init__(
        self,
        std: float,
        tied: bool = False,
        bias: Bias | None = None,
        softcap: float | None = None,
        hf_linear: str = "lm_head",
    ) -> None:
        super().__init__("")
        self.hf_linear = hf_linear
        config, model = self.config, self.config.model
        tokens = () if tied or not config.adapter.trainable_tokens_head else config.trained_tokens
        self.rows = TrainableTokenRows(tokens) if tokens else None
        self.vocab_size = model.output_vocab_size
        self.has_bias = bias is not None
        self.softcap = softcap
        self.product = create_matrix_product()
        if not tied:
            weight = Weight(f"{hf_linear}.weight", (self.vocab_size, model.hidden_size), std)
            self.weight = fused_parameter([weight], 1, transposed=True)
        if bias == "trained":
            self.bias = fused_parameter([Weight(f"{hf_linear}.bias", (self.vocab_size,), 0.0)], 0)
        elif bias == "buffer":
            buffer = Weight("final_logits_bias", (1, self.vocab_size), 0.0)
            self.bias = fused_parameter([buffer], 1, is_buffer=True)

    def build(self, x: Tensor, embedding_weights: Sequence[Tensor] | None = None) -> Tensor:
        """Computes logits: (..., hidden) -> float32 (..., ceil(vocab_size / tensor_parallel)).

        Each replica has the logits of its shard of the vocabulary; those of padding, after the end
        of the vocabulary, are `MASK_VALUE`.

        Args:
            embedding_weights: see `VocabularyEmbedding`, if the head is tied.
        """
        return self.compute_logits(self.groups.copy_to_tp(x), *self.head_weights(embedding_weights))

    def head_weights(self, embedding_weights: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Returns the head's weight, then bias and adapter (A, B) if it has them.

        Shapes: weight (hidden, local vocab size), bias (local vocab size,), A (hidden, rank), B
        (rank, local vocab size).
        """
        if embedding_weights is None:
            weight = self.weight if self.rows is None else self.rows(self.weight, transposed=True)
            lora = [*self.adapters()] if self.adapters else []
        else:
            weight, *lora = (t.transpose() for t in embedding_weights)
            lora.reverse()
        bias = [self.bias.reshape((-1,))] if self.has_bias else []
        return [weight, *bias, *lora]

    def product_dtype(self, x: Tensor) -> popxl.dtype:
        """Returns the dtype in which the logits of x leave the matmul."""
        return popxl.float32 if self.config.model.eval else x.dtype

    def compute_logits(self, x: Tensor, weight: Tensor, *bias_and_lora: Tensor) -> Tensor:
        """Computes the logits from a given weight; shapes as for `build`.

        Args:
            x: after `copy_to_tp`.
            bias_and_lora: results of `head_weights` after the weight.
        """
        shard = weight.shape[-1]
        count = int(self.has_bias)
        bias, lora = bias_and_lora[:count], bias_and_lora[count:]
        logits = self.product(x, weight, None, self.product_dtype(x))
        logits = cast_if_needed(logits, popxl.float32)
        if bias:
            logits = logits + cast_if_needed(bias[0], popxl.float32)
        if lora:
            a, b = lora
            logits = logits + cast_if_needed(x, popxl.float32) @ a @ b
        if self.softcap is not None:
            logits = ops.tanh(logits / self.softcap) * self.softcap
        padded_size = shard * self.groups.tensor_parallel
        if padded_size == self.vocab_size:
            return logits
        mask = np.where(np.arange(padded_size) < self.vocab_size, 0, MASK_VALUE)
        padding = popxl.constant(mask, popxl.float32, "vocabulary_padding")
        local_padding = ops.collectives.replicated_slice(padding, 0, self.groups.tp)
        return logits + local_padding.reshape((shard,))
