"""Greedy search: the next token is always the most probable one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import popxl
from modelling.generation.logits_processors import NO_PROCESSORS, LogitsProcessors
from modelling.generation.search import SearchContext
from modelling.generation.single_sequence import SingleSequenceSearch, StatelessStrategy
from modelling.layers import ParallelGroups, cast_if_needed
from popxl import Tensor, ops

LARGEST_EXACT_INTEGER = 2**24  # float32 holds every integer up to it


@dataclass(frozen=True)
class GreedyStrategy(StatelessStrategy):
    """Settings of greedy search, from which a program creates its `GreedySearch`."""

    logits_processors: LogitsProcessors = NO_PROCESSORS

    sequences_per_prompt = 1

    def create_search(self, context: SearchContext) -> GreedySearch:
        return GreedySearch(context)


@dataclass(frozen=True)
class GreedySearch(SingleSequenceSearch):
    """Chooses the token with the largest logit; of equal logits, the first token."""

    @property
    def groups(self) -> ParallelGroups:
        return self.context.groups

    def choose_tokens(self, logits: Tensor, position: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        token = ops.argmax(logits, 1)
        if self.groups.tensor_parallel == 1:
            return token
        local_size = logits.shape[1]
        check_vocab_size(local_size * self.groups.tensor_parallel)
        token = token + self.groups.tp_rank() * local_size
        return self._argmax_over_tp(ops.max(logits, 1), token)

    def _argmax_over_tp(self, logit: Tensor, token: Tensor) -> Tensor:
        """Argmax over the full vocabulary, from each replica's best: (batch,) -> int32 (batch,)."""
        # One collective for both: messages this small cost only latency.
        pair = ops.concat(
            [_reshape_to_row(logit), _reshape_to_row(cast_if_needed(token, popxl.float32))]
        )
        pairs = ops.collectives.replicated_all_gather(
            pair, group=self.groups.tp, output_shape="new_axis"
        )
        logits, tokens = ops.split(pairs, 2, axis=1)  # (members, 1, batch)
        worse = ops.greater(ops.max(logits, 0, keepdims=True), logits)
        no_token = popxl.constant(LARGEST_EXACT_INTEGER, popxl.float32)
        first = ops.min(ops.where(worse, no_token, tokens), (0, 1))
        return cast_if_needed(first, popxl.int32)


def check_vocab_size(vocab_size: int) -> None:
    """Raise ValueError if the vocabulary is too large for token ids to be sent as float32."""
    if vocab_size > LARGEST_EXACT_INTEGER:
        raise ValueError(
            f"a vocabulary of {vocab_size} tokens is too large: tokens travel as float32, which is "
            f"exact up to {LARGEST_EXACT_INTEGER}"
        )


def _reshape_to_row(x: Tensor) -> Tensor:
    """Reshape a vector to a row: (batch,) -> (1, batch)."""
    return x.reshape((1, x.shape[0]))
