"""Greedy search: the next token is the most probable one."""

from __future__ import annotations

from dataclasses import dataclass

import popxl
from modelling.layers import Groups, cast
from popxl import Tensor, ops

LARGEST_EXACT_INTEGER = 2**24  # up to which float32 holds every integer


@dataclass(frozen=True)
class Greedy:
    """Chooses the token with the largest logit, of equal ones the first.

    Attributes:
        groups: the vocabulary is cut over tensor parallelism; member r has the r-th part.
    """

    groups: Groups

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose one token for each sample.

        Args:
            logits: float32 (batch, part of the vocabulary), those of this replica.

        Returns:
            int32 (batch,), the same on the replicas of a tensor-parallel group.
        """
        token = ops.argmax(logits, 1)
        if self.groups.tensor_parallel == 1:
            return token
        part = logits.shape[1]
        if part * self.groups.tensor_parallel > LARGEST_EXACT_INTEGER:
            raise ValueError(
                f"a vocabulary of {part * self.groups.tensor_parallel} tokens is too large: "
                f"tokens travel as float32, which is exact up to {LARGEST_EXACT_INTEGER}"
            )
        token = token + self.groups.rank() * part
        return self._best(ops.max(logits, 1), token)

    def _best(self, logit: Tensor, token: Tensor) -> Tensor:
        """The best of the group's tokens, from each member's best one; both (batch,)."""
        # One message for both: the time of one so small is all latency.
        pair = ops.concat([_row(logit), _row(cast(token, popxl.float32))])
        pairs = ops.collectives.replicated_all_gather(
            pair, group=self.groups.tp, output_shape="new_axis"
        )
        logits, tokens = ops.split(pairs, 2, axis=1)  # (members, 1, batch)
        worse = ops.greater(ops.max(logits, 0, keepdims=True), logits)
        behind_all = popxl.constant(LARGEST_EXACT_INTEGER, popxl.float32)
        first = ops.min(ops.where(worse, behind_all, tokens), (0, 1))
        return cast(first, popxl.int32)


def _row(x: Tensor) -> Tensor:
    """(batch,) -> (1, batch)."""
    return x.reshape((1, x.shape[0]))
