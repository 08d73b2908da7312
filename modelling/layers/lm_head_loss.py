"""The output layer of a language model: final norm, dropout, logits and loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import popxl_addons as addons
from modelling.layers.dropout import NO_DROPOUT, Dropout
from modelling.layers.embedding import VocabularyEmbedding
from modelling.layers.head_loss import HeadLoss
from modelling.layers.lm_head import Bias, LMHead
from modelling.layers.module import Module
from popxl import Tensor

if TYPE_CHECKING:
    from modelling.layers.experts import ExpertUsage
    from modelling.objectives import TeacherStates

TEACHER = "teacher"
"""Name of the module in a student's output layer that is its teacher's."""

MAX_LOGIT_BYTES = 2**32
"""Limit on the logits that a replica computes at a time."""


class LMHeadLoss(HeadLoss):
    """The output layer of a language model, with an objective of the logits of all tokens.

    Args:
        norm, norm_name, dropout, expert_usage: see `HeadLoss`.
        std, bias, softcap, hf_linear: see `LMHead`.
        tokens: the embedding, if the head is tied to it.
        scale: factor on the logits.

    Attributes:
        teacher: the output layer of the teacher, see `set_teacher`.
    """

    teacher: LMHeadLoss | None = None

    def __init__(
        self,
        norm: Module | None,
        norm_name: str,
        std: float,
        tokens: VocabularyEmbedding | None = None,
        dropout: Dropout = NO_DROPOUT,
        scale: float = 1.0,
        bias: Bias | None = None,
        softcap: float | None = None,
        expert_usage: ExpertUsage | None = None,
        hf_linear: str = "lm_head",
    ) -> None:
        super().__init__(norm, norm_name, dropout, expert_usage)
        self.is_fp8 = self.config.fp8.enabled and self.config.fp8.head
        self.is_eval, self.scale = self.config.model.eval, scale
        self.tied = tokens is not None
        if tokens is not None:
            self.tokens = tokens
        plain = self.config.fp8.enabled and not self.is_fp8  # the layers around it are not
        with addons.fp8_autocast(None) if plain else nullcontext():
            self.lm_head = LMHead(std, self.tied, bias, softcap, hf_linear)

    def set_teacher(self, teacher: LMHeadLoss, states: TeacherStates) -> None:
        """Adds a teacher's output layer, which makes logits of its hidden states."""
        from modelling.objectives import FullDistillation

        assert isinstance(self.objective, FullDistillation), "nothing else reads a teacher's logits"
        self.objective.states, self.teacher = states, teacher

    def loss_stats(self, features: Tensor, token_inputs: Mapping[str, Tensor]) -> Tensor:
        """Computes the objective's statistics, in chunks of tokens if the logits are large."""
        if not self.objective.reads_logits:
            return self.objective.loss_stats(features, token_inputs, self.layout, self.groups)
        num_chunks, by_token = self._num_chunks(features), [*token_inputs.values()]
        held = [] if self.teacher is None else self.teacher._head_weights()
        if num_chunks == 1:
            logits = self.lm_head(features, self._embedding_weights())
            return self._stats_of_logits(logits, [*by_token, *held])
        from modelling.layers.chunk_loop import ChunkLoop, LossChunkLoop

        weights = self._head_weights()
        floats = [self.groups.copy_to_tp(features), *weights]

        def stats_of_chunk(inputs: Sequence[Tensor], seed: Tensor | None) -> Tensor:
            logits = self.lm_head.compute_logits(*inputs[: len(floats)])
            return self._stats_of_logits(logits, inputs[len(floats) :])

        length_axis = 0 if self.layout.transposed else 1
        axes = [length_axis, *[None] * len(weights), *[1] * len(by_token), *[None] * len(held)]
        out_axis = 1 if self.objective.has_token_stats else None
        loop: ChunkLoop = ChunkLoop(stats_of_chunk, num_chunks, axes, len(floats), out_axis)
        if self.objective.sums_token_losses and not self.is_eval:
            loop = LossChunkLoop(stats_of_chunk, num_chunks, axes, len(floats))
        call = self.call_module(loop, "sliced", autodiff="none" if self.is_eval else "auto")
        return call([*floats, *by_token, *held])[0]

    def _stats_of_logits(self, logits: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Computes the statistics of logits.

        Args:
            inputs: the objective's `token_inputs`, then the weights of the teacher's head.
        """
        names = [*self.objective.token_inputs]
        by_name = dict(zip(names, inputs, strict=False))
        if self.teacher is not None:
            from data.token_outputs import TEACHER_STATES
            from modelling.objectives import TEACHER_LOGITS

            states = self.layout.transpose_if_sequence_first(by_name.pop(TEACHER_STATES))
            by_name[TEACHER_LOGITS] = self.teacher.lm_head.compute_logits(
                states, *inputs[len(names) :]
            )
        return self.objective.loss_stats(logits, by_name, self.layout, self.groups)

    def _num_chunks(self, features: Tensor) -> int:
        """Returns the smallest number of chunks that keeps the logits within `MAX_LOGIT_BYTES`."""
        if self.is_fp8:
            return 1
        groups, length = self.groups, self.layout.sequence_length(features)
        tokens = features.nelms // features.shape[-1]
        itemsize = self.lm_head.product_dtype(features).itemsize
        if self.teacher is not None:
            itemsize += self.teacher.lm_head.product_dtype(features).itemsize
        nbytes = itemsize * tokens * groups.vocab_shard_size(self.lm_head.vocab_size)
        divisors = (n for n in range(1, length) if not length % n)
        return next((n for n in divisors if nbytes <= n * MAX_LOGIT_BYTES), length)

    def _head_weights(self) -> list[Tensor]:
        return self.lm_head.head_weights(self._embedding_weights())

    def _embedding_weights(self) -> list[Tensor] | None:
        return self.tokens.embedding_weights() if self.tied else None

    def features(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """Applies final norm, dropout and scale: (batch, length, hidden) -> the same shape."""
        x = super().features(x, seed)
        # The features are scaled, not the logits: they are fewer.
        return x if self.scale == 1 else x * self.scale

    def compute_logits(
        self, x: Tensor, embedding_weights: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Computes logits: (batch, length, hidden) -> float32 (batch, length, local vocab size).

        Args:
            embedding_weights: see `VocabularyEmbedding`, if the head is tied and this graph has
                them already.
        """
        if embedding_weights is None:
            embedding_weights = self._embedding_weights()
        return self.lm_head(self.features(x), embedding_weights)

    def next_token_logits(
        self, x: Tensor, embedding_weights: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Computes logits of one position: (batch, 1, hidden) -> (batch, local vocab size)."""
        logits = self.compute_logits(x, embedding_weights)
        return logits.reshape((-1, logits.shape[-1]))
