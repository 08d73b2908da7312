"""The end of a model: the final norm, the logits and what is learned of them."""

from __future__ import annotations

from collections.abc import Sequence

from config.sections import RunConfig
from modelling.fp8 import linear_head
from modelling.layers.axes import Axes
from modelling.layers.dropout import Dropout
from modelling.layers.embedding import VocabularyEmbedding
from modelling.layers.layer import Layer
from modelling.layers.lm_head import LMHead
from modelling.layers.parallel import Groups
from modelling.layers.sliced_loss import SlicedLoss
from modelling.objectives import objective_of
from popxl import Tensor

LARGEST_LOGITS = 2**32
"""Bytes of the logits that a replica computes at a time."""

SUMS, USAGE = "sums", "usage"
"""What goes to the host besides the loss: what that is a function of, and how experts are used."""


class LMHeadLoss(Layer):
    """A head (norm, dropout, logits) and an objective.

    Variables: those of `norm`, and `lm_head.weight` and `lm_head.bias`, see `LMHead`; if the head
    is tied to the embedding, `tokens.weight` instead, which the embeddings own.

    Attributes:
        told: names of what `build` returns after the loss.

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
        self.axes, self.objective = Axes.of(config), objective_of(config)
        self.told: tuple[str, ...] = (SUMS,) if self.objective.tells else ()
        self.is_fp8 = config.fp8.enabled and config.fp8.head
        self.is_evaluated = config.model.eval
        self.norm = norm
        self.dropout = dropout
        self.tied = tied
        self.scale = scale
        if tied:
            self.tokens = VocabularyEmbedding.of(config)
        with linear_head(config):
            own = not tied and config.adapter.trainable_tokens_head
            rows = config.trained_tokens if own else ()
            rows_of_all = config.model.embedding.vocab_size
            self.lm_head = LMHead(rows_of_all, groups, bias, cap, rows)

    def build(
        self, x: Tensor, *inputs: Tensor, seed: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The weighted loss of a micro-batch, see `Objective.loss` and `WEIGHT`, and the sums if
        the objective tells them.

        Args:
            x: the last layer's output, (batch, length, hidden).
            inputs: those of `Objective.streams`, in their order.
            seed: uint32 (2,) for dropout, the same on the replicas of a tensor-parallel group.

        Returns:
            The loss is a float32 scalar.
        """
        objective, (*own, weight) = self.objective, inputs
        tokens, texts = own[: len(objective.of_tokens)], own[len(objective.of_tokens) :]
        sums = self._sums(self.features(x, seed), tokens)
        named = dict(zip(objective.of_texts, texts, strict=True))
        loss = objective.loss(sums, named, self.lm_head.groups) * weight
        return (loss, sums) if objective.tells else loss

    def _sums(self, x: Tensor, tokens: Sequence[Tensor]) -> Tensor:
        slices = self._slices(x)
        if slices == 1:
            return self._sums_of(self.lm_head(x, self._table()), tokens)
        head, axis = self.lm_head, 0 if self.axes.transposed else 1

        def of_slice(x: Tensor, weights: Sequence[Tensor], tokens: Sequence[Tensor]) -> Tensor:
            return self._sums_of(head.of(x, *weights), tokens)

        sliced = SlicedLoss(of_slice, slices, axis)
        call = self.call_module(sliced, "sliced", autodiff="none" if self.is_evaluated else "auto")
        return call(head.groups.copy_to_tp(x), head.weights(x, self._table()), tokens)[0]

    def _sums_of(self, logits: Tensor, tokens: Sequence[Tensor]) -> Tensor:
        named = dict(zip(self.objective.of_tokens, tokens, strict=True))
        return self.objective.sums(logits, named, self.axes, self.lm_head.groups)

    def _slices(self, x: Tensor) -> int:
        """As few slices of the tokens as keep the logits of each within `LARGEST_LOGITS`."""
        if self.is_fp8:
            return 1
        groups, length = self.lm_head.groups, self.axes.length(x)
        nbytes = 4 * (x.nelms // x.shape[-1]) * groups.vocabulary_shard(self.lm_head.vocabulary)
        fit = (n for n in range(1, length) if not length % n and nbytes <= n * LARGEST_LOGITS)
        return next(fit, length)

    def _table(self) -> list[Tensor] | None:
        return self.tokens.table() if self.tied else None

    def features(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """What the logits are a product of; see `logits`."""
        x = self.dropout(self.norm(x), seed)
        # The features are scaled, not the logits: they are fewer.
        return x if self.scale == 1 else x * self.scale

    def logits(self, x: Tensor, table: Sequence[Tensor] | None = None) -> Tensor:
        """x: (batch, length, hidden) -> this replica's logits, float32; see `LMHead.build`.

        Args:
            table: what the embedding's `table` gave, where the graph has it and the head is tied to
                it.
        """
        return self.lm_head(self.features(x), self._table() if table is None else table)

    def next_logits(self, x: Tensor, table: Sequence[Tensor] | None = None) -> Tensor:
        """Like `logits` for one position: (batch, 1, hidden) -> (batch, part of the vocabulary)."""
        logits = self.logits(x, table)
        return logits.reshape((-1, logits.shape[-1]))
