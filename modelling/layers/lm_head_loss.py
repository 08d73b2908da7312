"""The end of a model: the final norm, the logits and the loss."""

from __future__ import annotations

from config.sections import RunConfig
from modelling.fp8 import linear_head
from modelling.layers.axes import Axes
from modelling.layers.dropout import Dropout
from modelling.layers.embedding import VocabularyEmbedding
from modelling.layers.layer import Layer
from modelling.layers.lm_head import LMHead
from modelling.layers.parallel import Groups
from popxl import Tensor


class LMHeadLoss(Layer):
    """Norm, dropout, logits and loss.

    Variables: those of `norm`, and `lm_head.weight` and `lm_head.bias`, see `LMHead`; if the head
    is tied to the embedding, `tokens.weight` instead, which the embeddings own.

    Args:
        norm: the stack's final norm.
        dropout: of its output.
        bias: whether the logits have one.
        tied: whether the weight of the logits is that of the embedding.
        scale: factor on the logits.
        cap: see `LMHead`.
    """

    def __init__(
        self,
        config: RunConfig,
        norm: Layer,
        dropout: Dropout,
        bias: bool,
        tied: bool = False,
        scale: float = 1.0,
        cap: float | None = None,
    ) -> None:
        super().__init__()
        groups = Groups.current(config.execution.tensor_parallel)
        self.axes = Axes.of(config)
        self.norm = norm
        self.dropout = dropout
        self.tied = tied
        self.scale = scale
        if tied:
            self.tokens = VocabularyEmbedding.of(config)
        with linear_head(config):
            self.lm_head = LMHead(config.model.embedding.vocab_size, groups, bias, cap)

    def build(
        self, x: Tensor, labels: Tensor, weight: Tensor, seed: Tensor | None = None
    ) -> Tensor:
        """The loss of a micro-batch: `weight` times the sum over its target tokens.

        The loss of a global batch is the mean over its target tokens. So that the mean of this
        over all micro-batches (of all data-parallel replicas) is that loss, the weight is the
        number of micro-batches divided by the number of target tokens in the global batch.

        Args:
            x: the last layer's output, (batch, length, hidden).
            labels: int32 (batch, length), `IGNORED` where there is no target.
            weight: float32 scalar.
            seed: uint32 (2,) for dropout, the same on the replicas of a tensor-parallel group.

        Returns:
            float32 scalar.
        """
        logits = self.logits(x, seed)
        tokens, classes = labels.nelms, logits.shape[-1]
        labels = self.axes.swap(labels)
        flat = logits.reshape((tokens, classes)), labels.reshape((tokens,))
        return self.lm_head.token_loss(*flat) * weight

    def logits(self, x: Tensor, seed: Tensor | None = None, table: Tensor | None = None) -> Tensor:
        """x: (batch, length, hidden) -> this replica's logits, float32; see `LMHead.build`.

        Args:
            table: the embedding's weight, where the graph has it and the head is tied to it.
        """
        if self.tied and table is None:
            table = self.tokens.table()
        x = self.dropout(self.norm(x), seed)
        # The features are scaled, not the logits: they are fewer.
        return self.lm_head(x if self.scale == 1 else x * self.scale, table)

    def next_logits(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        """As `logits` for one position: (batch, 1, hidden) -> (batch, part of the vocabulary)."""
        logits = self.logits(x, table=table)
        return logits.reshape((-1, logits.shape[-1]))
