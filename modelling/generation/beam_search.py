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
from modelling.generation.logits_processors import NO_PROCESSORS, LogitsProcessors
from modelling.generation.prompts import repeat_interleave
from modelling.generation.search import SearchContext, SearchStep
from modelling.generation.single_sequence import StatelessStrategy
from modelling.layers import cast
from popxl import Tensor, ops

MASKED_SCORE = -1.0e9
"""Score of sequences that must not be chosen; transformers' value."""


@dataclass(frozen=True)
class Beam(StatelessStrategy):
    """A `DecodingStrategy` that searches with beams.

    Attributes:
        beams: sequences kept for each prompt.
        length_penalty: exponent of a sequence's length in its score.
    """

    beams: int
    length_penalty: float = 1.0
    processors: LogitsProcessors = NO_PROCESSORS

    @property
    def sequences(self) -> int:
        return self.beams

    def search(self, context: SearchContext) -> BeamSearch:
        return BeamSearch(context, self)


@dataclass(frozen=True)
class BeamCandidates:
    """The best continuations of each prompt's running sequences, the best first.

    Attributes:
        scores: float32 (prompts, `num_candidates`), sums of log probabilities.
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
    def num_candidates(self) -> int:
        """Continuations of each prompt that a position looks at: enough for as many as there are
        beams not to end, as transformers counts."""
        return (
            max(2, 2 + len(self.context.special_tokens.extra_eos_token_ids)) * self.strategy.beams
        )

    def start(
        self, has_prompt: Tensor, prompt_tokens: Tensor, inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        prompts, beams, length = has_prompt.shape[0], self.strategy.beams, self.context.length
        tokens = np.full((prompts, beams * length), self.context.special_tokens.pad_token_id)
        first = np.where(np.arange(beams) == 0, 0.0, MASKED_SCORE)  # all beams are still the same
        stop_states, history = self.context.processors.start(prompt_tokens)
        states = [
            repeat_interleave(state, beams).reshape((prompts, beams)) for state in stop_states
        ]
        return [
            popxl.constant(tokens, popxl.int32, "running"),
            popxl.constant(np.tile(first, (prompts, 1)), popxl.float32, "running_scores"),
            popxl.constant(tokens, popxl.int32, "finished"),
            popxl.constant(
                np.full((prompts, beams), MASKED_SCORE), popxl.float32, "finished_scores"
            ),
            popxl.constant(np.zeros((prompts, beams)), popxl.bool, "is_finished"),
            has_prompt.reshape((prompts, 1)),
            *states,
            *history,
        ]

    def advance(self, logits: Tensor, position: Tensor, state: list[Tensor]) -> SearchStep:
        running, scores, finished, finished_scores, is_finished, unfinished_prompts, *rest = state
        stop_states, history, _ = self.context.processors.split_state(rest)
        top = self._best_candidates(self._scores(logits, position, running, history), scores)
        stop_states = [_gather_beams(states, top.beams, 1) for states in stop_states]
        stop_states, stopped = self.context.processors.advance_stops(stop_states, top.tokens)
        continuations = self._append_tokens(running, top, position)
        last = popxl.constant(self.context.length - 1, popxl.int32, "last")
        ends = ops.logical_or(
            self.context.special_tokens.is_end(top.tokens), ops.equal(position, last)
        )
        if stopped is not None:
            ends = ops.logical_or(ends, stopped)

        first_ones = np.arange(self.num_candidates) < self.strategy.beams
        ranked = popxl.constant(first_ones[None], popxl.bool, "first_ones")
        new = ops.logical_and(ends, ranked)
        penalised = top.scores / self._length_penalty(position)
        penalised = penalised + _mask_unless(new) + _mask_unless(unfinished_prompts)
        merged = ops.concat([finished_scores, penalised], 1)
        finished_scores, chosen = ops.topk(merged, self.strategy.beams, 1, True, True)
        both = ops.concat([finished, continuations], 1)
        finished = _gather_beams(both, chosen, self.context.length)
        is_finished = ops.cast(
            _gather_beams(ops.concat([_ints(is_finished), _ints(new)], 1), chosen, 1), popxl.bool
        )

        left = top.scores + _mask_unless(ops.logical_not(ends))
        scores, chosen = ops.topk(left, self.strategy.beams, 1, True, True)
        running = _gather_beams(continuations, chosen, self.context.length)
        input_ids, beam_idx = (
            _gather_beams(top.tokens, chosen, 1),
            _gather_beams(top.beams, chosen, 1),
        )
        unfinished_prompts = ops.logical_and(
            unfinished_prompts, self._may_improve(scores, finished_scores, is_finished, position)
        )
        stop_states = [_gather_beams(states, chosen, 1) for states in stop_states]
        state = [
            running,
            scores,
            finished,
            finished_scores,
            is_finished,
            unfinished_prompts,
            *stop_states,
            *history,
        ]
        sequences = input_ids.nelms
        return SearchStep(
            input_ids.reshape((sequences, 1)),
            self._batch_indices(beam_idx).reshape((sequences,)),
            state,
        )

    def unfinished(self, state: list[Tensor]) -> Tensor:
        return state[5].reshape((state[5].shape[0],))

    def tokens(self, state: list[Tensor]) -> Tensor:
        """The best finished sequence of each prompt."""
        return state[2][:, : self.context.length]

    # ---- parts ----------------------------------------------------------------------------------
    def _scores(
        self, logits: Tensor, position: Tensor, running: Tensor, history: list[Tensor]
    ) -> Tensor:
        """Log probabilities, as the rules leave them: like `logits`."""
        generated = running.reshape((logits.shape[0], self.context.length))
        log_probabilities = logits - self._log_normalizer(logits)
        return self.context.scores(log_probabilities, position, generated, history)

    def _best_candidates(self, log_probabilities: Tensor, scores: Tensor) -> BeamCandidates:
        groups, beams = self.context.groups, self.strategy.beams
        prompts, (sequences, part) = scores.shape[0], log_probabilities.shape
        most = min(self.num_candidates, part)
        best, tokens = ops.topk(log_probabilities, most, 1, True, True)
        best = best + scores.reshape((sequences, 1))
        best, tokens = (t.reshape((prompts, beams * most)) for t in (best, tokens))
        owner = np.repeat(np.arange(beams), most)
        if groups.tensor_parallel > 1:
            check_vocabulary(part * groups.tensor_parallel)
            tokens = tokens + groups.tp_rank() * part
            best = self._gather_vocabulary(best)
            tokens = cast(self._gather_vocabulary(cast(tokens, popxl.float32)), popxl.int32)
            owner = np.tile(owner, groups.tensor_parallel)
        top, chosen = ops.topk(best, self.num_candidates, 1, True, True)
        owners = popxl.constant(owner, popxl.int32, "beams")
        return BeamCandidates(top, _gather_beams(tokens, chosen, 1), ops.gather(owners, chosen))

    def _log_normalizer(self, logits: Tensor) -> Tensor:
        """The logarithm of the sum of exponentials over all of the vocabulary: (sequences, 1)."""
        total = ops.logsumexp(logits, 1, keepdims=True)
        if self.context.groups.tensor_parallel == 1:
            return total
        return ops.logsumexp(self._gather_vocabulary(total), 1, keepdims=True)

    def _gather_vocabulary(self, x: Tensor) -> Tensor:
        """(rows, n) of each member -> (rows, members * n)."""
        groups = self.context.groups
        parts = ops.collectives.replicated_all_gather(x, group=groups.tp, output_shape="new_axis")
        rows, n = x.shape
        return ops.transpose(parts, (1, 0, 2)).reshape((rows, groups.tensor_parallel * n))

    def _append_tokens(
        self, running: Tensor, candidates: BeamCandidates, position: Tensor
    ) -> Tensor:
        """The candidates' tokens, (prompts, `num_candidates` * length)."""
        prompts, count = candidates.tokens.shape
        length = self.context.length
        before = _gather_beams(running, candidates.beams, length).reshape((prompts, count, length))
        here = popxl.constant(np.arange(length).reshape(1, 1, -1), popxl.int32, "positions")
        new = candidates.tokens.reshape((prompts, count, 1))
        return ops.where(ops.equal(here, position), new, before).reshape((prompts, count * length))

    def _length_penalty(self, position: Tensor) -> Tensor:
        """The divisor of scores of sequences whose last token is at `position`."""
        lengths = np.arange(1, self.context.length + 1, dtype=np.float64)
        table = popxl.constant(lengths**self.strategy.length_penalty, popxl.float32, "penalties")
        return ops.gather(table, position)

    def _may_improve(
        self, scores: Tensor, finished_scores: Tensor, is_finished: Tensor, position: Tensor
    ) -> Tensor:
        """Whether a running sequence may yet be better than a finished one: bool (prompts, 1)."""
        best = ops.max(scores, 1, keepdims=True) / self._length_penalty(position)
        worst = -ops.max(-finished_scores, 1, keepdims=True)
        never = popxl.constant(MASKED_SCORE, popxl.float32)
        better = ops.greater(best, ops.where(is_finished, worst, never))
        return ops.cast(ops.max(_ints(better), 1, keepdims=True), popxl.bool)

    def _batch_indices(self, beam_idx: Tensor) -> Tensor:
        """The number in the batch of a prompt's sequence: int32 (prompts, beams)."""
        first = np.arange(beam_idx.shape[0])[:, None] * self.strategy.beams
        return beam_idx + popxl.constant(first, popxl.int32, "first_sequences")


def _gather_beams(x: Tensor, chosen: Tensor, length: int) -> Tensor:
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


def _mask_unless(wanted: Tensor) -> Tensor:
    """0 where `wanted`, else `MASKED_SCORE`."""
    zero, never = (popxl.constant(x, popxl.float32) for x in (0.0, MASKED_SCORE))
    return ops.where(wanted, zero, never)
