"""Greedy search: the next token is the most probable one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import popxl
from modelling.generation.logits_processors import NO_PROCESSORS, LogitsProcessors
from modelling.generation.search import SearchContext
from modelling.generation.single_sequence import SingleSequenceSearch, StatelessStrategy
from modelling.layers import ParallelGroups, cast
from popxl import Tensor, ops

LARGEST_EXACT_INTEGER = 2**24  # up to which float32 holds every integer


@dataclass(frozen=True)
class Greedy(StatelessStrategy):
    """A `DecodingStrategy`: the next token is the most probable one."""

    processors: LogitsProcessors = NO_PROCESSORS

    sequences = 1

    def search(self, context: SearchContext) -> GreedySearch:
        return GreedySearch(context)


@dataclass(frozen=True)
class GreedySearch(SingleSequenceSearch):
    """Chooses the token with the largest logit, of equal ones the first."""

    @property
    def groups(self) -> ParallelGroups:
        return self.context.groups

    def choose(self, logits: Tensor, position: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        token = ops.argmax(logits, 1)
        if self.groups.tensor_parallel == 1:
            return token
        part = logits.shape[1]
        check_vocabulary(part * self.groups.tensor_parallel)
        token = token + self.groups.tp_rank() * part
        return self._best(ops.max(logits, 1), token)

    def _best(self, logit: Tensor, token: Tensor) -> Tensor:
        """The best of the group's tokens, from each member's best one; both (batch,)."""
        # One message for both: messages this small cost only latency.
        pair = ops.concat([_row(logit), _row(cast(token, popxl.float32))])
        pairs = ops.collectives.replicated_all_gather(
            pair, group=self.groups.tp, output_shape="new_axis"
        )
        logits, tokens = ops.split(pairs, 2, axis=1)  # (members, 1, batch)
        worse = ops.greater(ops.max(logits, 0, keepdims=True), logits)
        behind_all = popxl.constant(LARGEST_EXACT_INTEGER, popxl.float32)
        first = ops.min(ops.where(worse, behind_all, tokens), (0, 1))
        return cast(first, popxl.int32)


def check_vocabulary(size: int) -> None:
    """Raise ValueError if tokens of a vocabulary cannot be sent as float32."""
    if size > LARGEST_EXACT_INTEGER:
        raise ValueError(
            f"a vocabulary of {size} tokens is too large: tokens travel as float32, which is "
            f"exact up to {LARGEST_EXACT_INTEGER}"
        )


def _row(x: Tensor) -> Tensor:
    """(batch,) -> (1, batch)."""
    return x.reshape((1, x.shape[0]))
