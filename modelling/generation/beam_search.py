"""Beam search: the likeliest sequences found, as transformers' `generate` finds them.

Each prompt has `beams` running sequences, and as many finished ones with scores: the sum of the
tokens' log probabilities, divided by length ** length_penalty. At each position it considers the 2
x beams best continuations of all running sequences, more if several tokens end a sequence. Those
among the first `beams` that end are finished; the best that do not end keep running. A prompt is
done when its best running sequence, scored at its present length, is worse than all finished ones
(transformers' `early_stopping=False`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import popxl
from modelling.generation.greedy_search import check_vocabulary
from modelling.generation.logits_processors import NO_RULES, Rules
from modelling.generation.prompts import repeated
from modelling.generation.search import Advance, SearchContext
from modelling.generation.single_sequence import WithoutInputs
from modelling.layers import cast
from popxl import Tensor, ops

NEVER = -1.0e9
"""Score of sequences that must not be chosen; transformers' value."""


@dataclass(frozen=True)
class Beam(WithoutInputs):
    """A `Strategy` that searches with beams.

    Attributes:
        beams: sequences kept for each prompt.
        length_penalty: exponent of a sequence's length in its score.
    """

    beams: int
    length_penalty: float = 1.0
    rules: Rules = NO_RULES

    @property
    def sequences(self) -> int:
        return self.beams

    def search(self, context: SearchContext) -> BeamSearch:
        return BeamSearch(context, self)


@dataclass(frozen=True)
class Candidates:
    """The best continuations of each prompt's running sequences, the best first.

    Attributes:
        scores: float32 (prompts, `looked_at`), sums of log probabilities.
        tokens: int32, the same shape.
        beams: int32, the same shape: the running sequence that each one continues.
    """

    scores: Tensor
    tokens: Tensor
    beams: Tensor


@dataclass(frozen=True)
class BeamSearch:
    """A `Search`. Its state: running tokens and scores, finished tokens, scores and whether there
    are any, which prompts go on, and what the rules keep of running sequences."""

    context: SearchContext
    strategy: Beam

    @property
    def looked_at(self) -> int:
        """Continuations of each prompt that a position looks at: enough for as many as there are
        beams not to end, as transformers counts."""
        return max(2, 2 + len(self.context.special.others)) * self.strategy.beams

    def start(self, prompted: Tensor, read: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
        prompts, beams, length = prompted.shape[0], self.strategy.beams, self.context.length
        tokens = np.full((prompts, beams * length), self.context.special.pad)
        first = np.where(np.arange(beams) == 0, 0.0, NEVER)  # all beams are still the same
        stops, stays = self.context.rules.start(read)
        states = [repeated(state, beams).reshape((prompts, beams)) for state in stops]
        return [
            popxl.constant(tokens, popxl.int32, "running"),
            popxl.constant(np.tile(first, (prompts, 1)), popxl.float32, "running_scores"),
            popxl.constant(tokens, popxl.int32, "finished"),
            popxl.constant(np.full((prompts, beams), NEVER), popxl.float32, "finished_scores"),
            popxl.constant(np.zeros((prompts, beams)), popxl.bool, "is_finished"),
            prompted.reshape((prompts, 1)),
            *states,
            *stays,
        ]

    def advance(self, logits: Tensor, position: Tensor, state: list[Tensor]) -> Advance:
        running, scores, finished, finished_scores, is_finished, going_on, *rest = state
        stops, stays, _ = self.context.rules.parts(rest)
        top = self._candidates(self._scores(logits, position, running, stays), scores)
        stops = [_take_rows(states, top.beams, 1) for states in stops]
        stops, stopped = self.context.rules.ended(stops, top.tokens)
        continued = self._continued(running, top, position)
        last = popxl.constant(self.context.length - 1, popxl.int32, "last")
        ends = ops.logical_or(self.context.special.ends(top.tokens), ops.equal(position, last))
        if stopped is not None:
            ends = ops.logical_or(ends, stopped)

        first_ones = np.arange(self.looked_at) < self.strategy.beams
        ranked = popxl.constant(first_ones[None], popxl.bool, "first_ones")
        new = ops.logical_and(ends, ranked)
        penalised = top.scores / self._length(position)
        penalised = penalised + _never_unless(new) + _never_unless(going_on)
        merged = ops.concat([finished_scores, penalised], 1)
        finished_scores, chosen = ops.topk(merged, self.strategy.beams, 1, True, True)
        both = ops.concat([finished, continued], 1)
        finished = _take_rows(both, chosen, self.context.length)
        is_finished = ops.cast(
            _take_rows(ops.concat([_ints(is_finished), _ints(new)], 1), chosen, 1), popxl.bool
        )

        left = top.scores + _never_unless(ops.logical_not(ends))
        scores, chosen = ops.topk(left, self.strategy.beams, 1, True, True)
        running = _take_rows(continued, chosen, self.context.length)
        input_ids, parents = _take_rows(top.tokens, chosen, 1), _take_rows(top.beams, chosen, 1)
        going_on = ops.logical_and(
            going_on, self._can_improve(scores, finished_scores, is_finished, position)
        )
        stops = [_take_rows(states, chosen, 1) for states in stops]
        state = [running, scores, finished, finished_scores, is_finished, going_on, *stops, *stays]
        sequences = input_ids.nelms
        return Advance(
            input_ids.reshape((sequences, 1)), self._flat(parents).reshape((sequences,)), state
        )

    def unfinished(self, state: list[Tensor]) -> Tensor:
        return state[5].reshape((state[5].shape[0],))

    def tokens(self, state: list[Tensor]) -> Tensor:
        """The best finished sequence of each prompt."""
        return state[2][:, : self.context.length]

    # ---- parts ----------------------------------------------------------------------------------
    def _scores(
        self, logits: Tensor, position: Tensor, running: Tensor, stays: list[Tensor]
    ) -> Tensor:
        """Log probabilities, as the rules leave them: like `logits`."""
        written = running.reshape((logits.shape[0], self.context.length))
        log_probabilities = logits - self._log_total(logits)
        return self.context.scores(log_probabilities, position, written, stays)

    def _candidates(self, log_probabilities: Tensor, scores: Tensor) -> Candidates:
        groups, beams = self.context.groups, self.strategy.beams
        prompts, (sequences, part) = scores.shape[0], log_probabilities.shape
        most = min(self.looked_at, part)
        best, tokens = ops.topk(log_probabilities, most, 1, True, True)
        best = best + scores.reshape((sequences, 1))
        best, tokens = (t.reshape((prompts, beams * most)) for t in (best, tokens))
        owner = np.repeat(np.arange(beams), most)
        if groups.tensor_parallel > 1:
            check_vocabulary(part * groups.tensor_parallel)
            tokens = tokens + groups.rank() * part
            best = self._gathered(best)
            tokens = cast(self._gathered(cast(tokens, popxl.float32)), popxl.int32)
            owner = np.tile(owner, groups.tensor_parallel)
        top, chosen = ops.topk(best, self.looked_at, 1, True, True)
        owners = popxl.constant(owner, popxl.int32, "beams")
        return Candidates(top, _take_rows(tokens, chosen, 1), ops.gather(owners, chosen))

    def _log_total(self, logits: Tensor) -> Tensor:
        """The logarithm of the sum of exponentials over all of the vocabulary: (sequences, 1)."""
        total = ops.logsumexp(logits, 1, keepdims=True)
        if self.context.groups.tensor_parallel == 1:
            return total
        return ops.logsumexp(self._gathered(total), 1, keepdims=True)

    def _gathered(self, x: Tensor) -> Tensor:
        """(rows, n) of each member -> (rows, members * n)."""
        groups = self.context.groups
        parts = ops.collectives.replicated_all_gather(x, group=groups.tp, output_shape="new_axis")
        rows, n = x.shape
        return ops.transpose(parts, (1, 0, 2)).reshape((rows, groups.tensor_parallel * n))

    def _continued(self, running: Tensor, candidates: Candidates, position: Tensor) -> Tensor:
        """The candidates' tokens, (prompts, `looked_at` * length)."""
        prompts, count = candidates.tokens.shape
        length = self.context.length
        before = _take_rows(running, candidates.beams, length).reshape((prompts, count, length))
        here = popxl.constant(np.arange(length).reshape(1, 1, -1), popxl.int32, "positions")
        new = candidates.tokens.reshape((prompts, count, 1))
        return ops.where(ops.equal(here, position), new, before).reshape((prompts, count * length))

    def _length(self, position: Tensor) -> Tensor:
        """The divisor of scores of sequences whose last token is at `position`."""
        lengths = np.arange(1, self.context.length + 1, dtype=np.float64)
        table = popxl.constant(lengths**self.strategy.length_penalty, popxl.float32, "penalties")
        return ops.gather(table, position)

    def _can_improve(
        self, scores: Tensor, finished_scores: Tensor, is_finished: Tensor, position: Tensor
    ) -> Tensor:
        """Whether a running sequence may yet be better than a finished one: bool (prompts, 1)."""
        best = ops.max(scores, 1, keepdims=True) / self._length(position)
        worst = -ops.max(-finished_scores, 1, keepdims=True)
        never = popxl.constant(NEVER, popxl.float32)
        better = ops.greater(best, ops.where(is_finished, worst, never))
        return ops.cast(ops.max(_ints(better), 1, keepdims=True), popxl.bool)

    def _flat(self, parents: Tensor) -> Tensor:
        """The number in the batch of a prompt's sequence: int32 (prompts, beams)."""
        first = np.arange(parents.shape[0])[:, None] * self.strategy.beams
        return parents + popxl.constant(first, popxl.int32, "first_sequences")


def _take_rows(x: Tensor, chosen: Tensor, length: int) -> Tensor:
    """Rows of `length` of each prompt: x (prompts, n * length) -> (prompts, chosen * length).

    Args:
        chosen: int32 (prompts, k), which of a prompt's n rows.
    """
    prompts, n = x.shape[0], x.shape[1] // length
    first = popxl.constant(np.arange(prompts)[:, None] * n, popxl.int32, "first_rows")
    taken = ops.gather(x.reshape((prompts * n, length)), chosen + first)
    return taken.reshape((prompts, chosen.shape[1] * length))


def _ints(t: Tensor) -> Tensor:
    return ops.cast(t, popxl.int32)


def _never_unless(wanted: Tensor) -> Tensor:
    """0 where `wanted`, else `NEVER`."""
    zero, never = (popxl.constant(x, popxl.float32) for x in (0.0, NEVER))
    return ops.where(wanted, zero, never)
