"""The end of a model: the final norm, the logits and what is learned of them."""

from __future__ import annotations

from collections.abc import Sequence

from modelling.fp8 import fp8_head
from modelling.layers.dropout import NO_DROPOUT, Dropout
from modelling.layers.embedding import VocabularyEmbedding
from modelling.layers.experts import ExpertUsage
from modelling.layers.lm_head import Bias, LMHead
from modelling.layers.module import Module
from modelling.layers.slices import ChunkLoop
from modelling.objectives import LOSS_WEIGHT, make_objective
from popxl import Tensor

MAX_LOGIT_BYTES = 2**32
"""Bytes of the logits that a replica computes at a time."""

LOSS_STATS, EXPERT_USAGE = "loss_stats", "expert_usage"
"""What goes to the host besides the loss: what that is a function of, and how experts are used."""


class LMHeadLoss(Module):
    """A head (norm, dropout, logits) and an objective.

    Attributes:
        told: names of what `build` returns after the loss.

    Args:
        norm: the stack's final norm, if it has one; `norm_name`: Hugging Face's path of it.
        std, bias, cap: see `LMHead`.
        tokens: the embedding, if its weight is the head's too.
        dropout: of the norm's output.
        scale: factor on the logits.
        usage: of experts, which a loss balances; None: there are none, or they are not counted.
    """

    def __init__(
        self,
        norm: Module | None,
        norm_name: str,
        std: float,
        tokens: VocabularyEmbedding | None = None,
        dropout: Dropout = NO_DROPOUT,
        scale: float = 1.0,
        bias: Bias | None = None,
        cap: float | None = None,
        expert_usage: ExpertUsage | None = None,
    ) -> None:
        super().__init__()
        config = self.config
        self.objective, self.expert_usage = make_objective(config), expert_usage
        stats = [LOSS_STATS] if self.objective.returns_stats else []
        self.aux_outputs = (*stats, *([] if expert_usage is None else [EXPERT_USAGE]))
        self.is_fp8 = config.fp8.enabled and config.fp8.head
        self.is_evaluated = config.model.eval
        self.norm, self.dropout, self.scale = norm, dropout, scale
        if norm is not None:
            norm.hf_name = norm_name
        self.tied = tokens is not None
        if tokens is not None:
            self.tokens = tokens
        with fp8_head(config):
            self.lm_head = LMHead(std, self.tied, bias, cap)

    def build(
        self,
        x: Tensor,
        expert_usage: Tensor | None = None,
        seed: Tensor | None = None,
        **inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        """The weighted loss of a micro-batch, see `Objective.loss` and `LOSS_WEIGHT`; the sums if
        the objective tells them; and how experts were used, if that is counted.

        Args:
            x: the last layer's output, (batch, length, hidden).
            usage: of experts, see `ExpertUsage`.
            inputs: those of `Objective.streams`.
            seed: uint32 (2,) for dropout, the same on the replicas of a tensor-parallel group.

        Returns:
            The loss is a float32 scalar.
        """
        objective = self.objective
        sums = self._sums(self.features(x, seed), [inputs[name] for name in objective.token_inputs])
        texts = {name: inputs[name] for name in objective.sequence_inputs}
        loss = objective.loss(sums, texts, self.groups) * inputs[LOSS_WEIGHT]
        aux_outputs = [sums] if objective.returns_stats else []
        if self.expert_usage is not None and expert_usage is not None:
            loss = self.expert_usage.balanced(loss, expert_usage)
            aux_outputs = [*aux_outputs, expert_usage]
        return loss, *aux_outputs

    def _sums(self, x: Tensor, tokens: Sequence[Tensor]) -> Tensor:
        slices = self._slices(x)
        if slices == 1:
            return self._sums_of(self.lm_head(x, self._embedding_weights()), tokens)
        floats = [self.groups.copy_to_tp(x), *self.lm_head.weights(self._embedding_weights())]

        def of_slice(inputs: Sequence[Tensor], seed: Tensor | None) -> Tensor:
            logits = self.lm_head.compute_logits(*inputs[: len(floats)])
            return self._sums_of(logits, inputs[len(floats) :])

        axes = [0 if self.layout.transposed else 1, *[None] * (len(floats) - 1), *[1] * len(tokens)]
        sliced = ChunkLoop(of_slice, slices, axes, len(floats), out_axis=None)
        call = self.call_module(sliced, "sliced", autodiff="none" if self.is_evaluated else "auto")
        return call([*floats, *tokens])[0]

    def _sums_of(self, logits: Tensor, tokens: Sequence[Tensor]) -> Tensor:
        named = dict(zip(self.objective.token_inputs, tokens, strict=True))
        return self.objective.loss_stats(logits, named, self.layout, self.groups)

    def _slices(self, x: Tensor) -> int:
        """As few slices of the tokens as keep the logits of each within `MAX_LOGIT_BYTES`."""
        if self.is_fp8:
            return 1
        groups, length = self.groups, self.layout.length(x)
        nbytes = 4 * (x.nelms // x.shape[-1]) * groups.vocab_shard_size(self.lm_head.vocabulary)
        fit = (n for n in range(1, length) if not length % n and nbytes <= n * MAX_LOGIT_BYTES)
        return next(fit, length)

    def _embedding_weights(self) -> list[Tensor] | None:
        return self.tokens.embedding_weights() if self.tied else None

    def features(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """What the logits are a product of; see `logits`."""
        x = self.dropout(x if self.norm is None else self.norm(x), seed)
        # The features are scaled, not the logits: they are fewer.
        return x if self.scale == 1 else x * self.scale

    def logits(self, x: Tensor, embedding_weights: Sequence[Tensor] | None = None) -> Tensor:
        """x: (batch, length, hidden) -> this replica's logits, float32; see `LMHead.build`.

        Args:
            embedding_weights: of `VocabularyEmbedding`, where the head is tied to it and this
                graph has them already.
        """
        if embedding_weights is None:
            embedding_weights = self._embedding_weights()
        return self.lm_head(self.features(x), embedding_weights)

    def next_token_logits(
        self, x: Tensor, embedding_weights: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Like `logits` for one position: (batch, 1, hidden) -> (batch, part of the vocabulary)."""
        logits = self.logits(x, embedding_weights)
        return logits.reshape((-1, logits.shape[-1]))
