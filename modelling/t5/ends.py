"""What is before and after T5's stacks: embeddings, the end of the encoder, the head."""

from __future__ import annotations

import popxl
from config.t5 import T5Config
from modelling.layers import Dropout, Groups, Layer, LMHead, RMSNorm, VocabularyEmbedding
from popxl import Tensor


class Embeddings(Layer):
    """Token embeddings, of the encoder or (with the same weight) the decoder.

    Variables: `tokens.weight`, see `VocabularyEmbedding`.
    """

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        model = config.model
        self.dropout = Dropout.of(model)
        self.tokens = VocabularyEmbedding(
            model.embedding.vocab_size,
            model.hidden_size,
            popxl.dtype.as_dtype(model.precision),
            Groups.current(config.execution.tensor_parallel),
        )

    def build(self, words: Tensor, seed: Tensor | None = None) -> Tensor:
        """words: int32 (batch, length) -> (batch, length, hidden).

        Args:
            seed: uint32 (2,) for dropout, the same on the replicas of a tensor-parallel group.
        """
        return self.dropout(self.tokens(words), seed)


class FinalNorm(Layer):
    """The end of a stack: norm and dropout.

    Variables: `norm.weight`.
    """

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.dropout = Dropout.of(config.model)
        self.norm = RMSNorm(config.model.layer_norm_epsilon)

    def build(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> the same shape."""
        return self.dropout(self.norm(x), seed)


class EncoderHead(FinalNorm):
    """The end of the encoder."""


class Head(FinalNorm):
    """The end of the decoder, the logits and the loss.

    Variables: `norm.weight`, `lm_head.weight`, see `LMHead`.
    """

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        groups = Groups.current(config.execution.tensor_parallel)
        self.lm_head = LMHead(config.model.embedding.vocab_size, groups)

    def build(  # type: ignore[override]
        self, x: Tensor, labels: Tensor, weight: Tensor, seed: Tensor | None = None
    ) -> Tensor:
        """The loss of a micro-batch: `weight` times the sum over its target tokens.

        The loss of a global batch is the mean over its target tokens. So that the mean of this
        over all micro-batches (of all data-parallel replicas) is that loss, the weight is the
        number of micro-batches divided by the number of target tokens in the global batch.

        Args:
            x: the last decoder layer's output, (batch, length, hidden).
            labels: int32 (batch, length), `IGNORED` where there is no target.
            weight: float32 scalar.
            seed: uint32 (2,) for dropout, the same on the replicas of a tensor-parallel group.

        Returns:
            float32 scalar.
        """
        logits = self.logits(x, seed)
        tokens, classes = labels.nelms, logits.shape[-1]
        flat = logits.reshape((tokens, classes)), labels.reshape((tokens,))
        return self.lm_head.token_loss(*flat) * weight

    def logits(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> this replica's logits, float32; see `LMHead.build`."""
        return self.lm_head(super().build(x, seed))
