"""Beam search with the same results as transformers' `generate`.

Each prompt has `beams` running sequences, and as many finished ones with scores: the sum of the
tokens' log probabilities, divided by length ** length_penalty. Each position considers the 2 x
beams best continuations of all running sequences, more if several tokens end a sequence. Those
among the first `beams` that end are finished; the best that do not end keep running. A prompt is
done when its best running sequence, scored at its present length, is worse than all finished ones
(transformers' `early_stopping=False`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import popxl
from modelling.generation.greedy_search import check_vocab_size
from modelling.generation.logits_processors import NO_PROCESSORS, LogitsProcessors
from modelling.generation.prompts import repeat_interleave
from modelling.generation.search import SearchContext, SearchStepResult
from modelling.generation.single_sequence import StatelessStrategy
from modelling.layers import cast_if_needed
from popxl import Tensor, ops

MASKED_SCORE = -1.0e9
"""Score of sequences that must not be selected; transformers' value."""


@dataclass(frozen=True)
class BeamSearchStrategy(StatelessStrategy):
    """Settings of beam search, from which a program creates its `BeamSearch`.

    Attributes:
        beams: number of running sequences of each prompt.
        length_penalty: exponent of a sequence's length in its score.
    """

    beams: int
    length_penalty: float = 1.0
    logits_processors: LogitsProcessors = NO_PROCESSORS

    @property
    def sequences_per_prompt(self) -> int:
        return self.beams

    def create_search(self, context: SearchContext) -> BeamSearch:
        return BeamSearch(context, self)


@dataclass(frozen=True)
class BeamCandidates:
    """Candidate continuations of each prompt's unfinished beams, best first.

    Attributes:
        scores: float32 (prompts, `num_candidates`), sums of log probabilities.
        tokens: int32, same shape.
        beams: int32, same shape, the running sequence that each candidate continues.
    """

    scores: Tensor
    tokens: Tensor
    beams: Tensor


@dataclass(frozen=True)
class BeamSearch:
    """Beam search: chooses the tokens of several beams (sequences) per prompt.

    Its state: tokens and scores of the running sequences; tokens, scores and validity of the
    finished ones; which prompts are unfinished; state and token history of the logits processors.
    """

    context: SearchContext
    strategy: BeamSearchStrategy

    @property
    def num_candidates(self) -> int:
        """Number of continuations considered per prompt; enough that one per beam does not end."""
        extra = len(self.context.special_tokens.extra_eos_token_ids)
        return (2 + extra) * self.strategy.beams

    def init_state(
        self, is_real_prompt: Tensor, prompt_tokens: Tensor, inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        prompts, beams, length = is_real_prompt.shape[0], self.strategy.beams, self.context.length
        tokens = np.full((prompts, beams * length), self.context.special_tokens.pad_token_id)
        # All beams are equal before the first token: only the first one counts.
        first = np.where(np.arange(beams) == 0, 0.0, MASKED_SCORE)
        stop_states, history = self.context.logits_processors.init_state(prompt_tokens)
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
            is_real_prompt.reshape((prompts, 1)),
            *states,
            *history,
        ]

    def advance(self, logits: Tensor, position: Tensor, state: list[Tensor]) -> SearchStepResult:
        (
            running,
            scores,
            finished,
            finished_scores,
            is_finished,
            unfinished_prompts,
            *processor_state,
        ) = state
        stop_states, history, _ = self.context.logits_processors.split_state(processor_state)
        top = self._best_candidates(self._score_tokens(logits, position, running, history), scores)
        stop_states = [_gather_beams(states, top.beams, 1) for states in stop_states]
        stop_states, stopped = self.context.logits_processors.advance_stop_states(
            stop_states, top.tokens
        )
        continuations = self._append_tokens(running, top, position)
        last = popxl.constant(self.context.length - 1, popxl.int32, "last")
        ends = ops.logical_or(
            self.context.special_tokens.is_eos(top.tokens), ops.equal(position, last)
        )
        if stopped is not None:
            ends = ops.logical_or(ends, stopped)

        is_ranked = np.arange(self.num_candidates) < self.strategy.beams
        ranked = popxl.constant(is_ranked[None], popxl.bool, "ranked")
        new = ops.logical_and(ends, ranked)
        penalized = top.scores / self._length_penalty(position)
        penalized = penalized + _mask_disallowed(new) + _mask_disallowed(unfinished_prompts)
        merged = ops.concat([finished_scores, penalized], 1)
        finished_scores, best = ops.topk(merged, self.strategy.beams, 1, True, True)
        both = ops.concat([finished, continuations], 1)
        finished = _gather_beams(both, best, self.context.length)
        is_finished = ops.cast(
            _gather_beams(
                ops.concat([_cast_to_int32(is_finished), _cast_to_int32(new)], 1), best, 1
            ),
            popxl.bool,
        )

        running_scores = top.scores + _mask_disallowed(ops.logical_not(ends))
        scores, best = ops.topk(running_scores, self.strategy.beams, 1, True, True)
        running = _gather_beams(continuations, best, self.context.length)
        input_ids, beam_idx = _gather_beams(top.tokens, best, 1), _gather_beams(top.beams, best, 1)
        unfinished_prompts = ops.logical_and(
            unfinished_prompts,
            self._can_beat_finished(scores, finished_scores, is_finished, position),
        )
        stop_states = [_gather_beams(states, best, 1) for states in stop_states]
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
        return SearchStepResult(
            input_ids.reshape((sequences, 1)),
            self._batch_indices(beam_idx).reshape((sequences,)),
            state,
        )

    def unfinished_prompts(self, state: list[Tensor]) -> Tensor:
        return state[5].reshape((state[5].shape[0],))

    def output_tokens(self, state: list[Tensor]) -> Tensor:
        """Return the best finished sequence of each prompt: int32 (prompts, length)."""
        return state[2][:, : self.context.length]

    # ---- steps ----------------------------------------------------------------------------------
    def _score_tokens(
        self, logits: Tensor, position: Tensor, running: Tensor, history: list[Tensor]
    ) -> Tensor:
        """Log probabilities after the logits processors: float32 (sequences, local vocabulary)."""
        generated = running.reshape((logits.shape[0], self.context.length))
        log_probabilities = logits - self._log_sum_exp(logits)
        return self.context.process_scores(log_probabilities, position, generated, history)

    def _best_candidates(self, log_probabilities: Tensor, scores: Tensor) -> BeamCandidates:
        groups, beams = self.context.groups, self.strategy.beams
        prompts, (sequences, local_size) = scores.shape[0], log_probabilities.shape
        k = min(self.num_candidates, local_size)
        best, tokens = ops.topk(log_probabilities, k, 1, True, True)
        best = best + scores.reshape((sequences, 1))
        best, tokens = (t.reshape((prompts, beams * k)) for t in (best, tokens))
        beam_of_candidate = np.repeat(np.arange(beams), k)
        if groups.tensor_parallel > 1:
            check_vocab_size(local_size * groups.tensor_parallel)
            tokens = tokens + groups.tp_rank() * local_size
            best = self.context.gather_vocabulary(best)
            tokens = self.context.gather_vocabulary(cast_if_needed(tokens, popxl.float32))
            tokens = cast_if_needed(tokens, popxl.int32)
            beam_of_candidate = np.tile(beam_of_candidate, groups.tensor_parallel)
        top, index = ops.topk(best, self.num_candidates, 1, True, True)
        beams_tensor = popxl.constant(beam_of_candidate, popxl.int32, "beams")
        return BeamCandidates(top, _gather_beams(tokens, index, 1), ops.gather(beams_tensor, index))

    def _log_sum_exp(self, logits: Tensor) -> Tensor:
        """Log-sum-exp over the full vocabulary: (sequences, local vocabulary) -> (sequences, 1)."""
        total = ops.logsumexp(logits, 1, keepdims=True)
        if self.context.groups.tensor_parallel == 1:
            return total
        return ops.logsumexp(self.context.gather_vocabulary(total), 1, keepdims=True)

    def _append_tokens(
        self, running: Tensor, candidates: BeamCandidates, position: Tensor
    ) -> Tensor:
        """Append each candidate's token to its beam: int32 (prompts, `num_candidates` * length)."""
        prompts, count = candidates.tokens.shape
        length = self.context.length
        before = _gather_beams(running, candidates.beams, length).reshape((prompts, count, length))
        positions = popxl.constant(np.arange(length).reshape(1, 1, -1), popxl.int32, "positions")
        new = candidates.tokens.reshape((prompts, count, 1))
        return ops.where(ops.equal(positions, position), new, before).reshape(
            (prompts, count * length)
        )

    def _length_penalty(self, position: Tensor) -> Tensor:
        """Divisor (length penalty) of the score of a sequence that ends at `position`, float32."""
        lengths = np.arange(1, self.context.length + 1, dtype=np.float64)
        table = popxl.constant(lengths**self.strategy.length_penalty, popxl.float32, "penalties")
        return ops.gather(table, position)

    def _can_beat_finished(
        self, scores: Tensor, finished_scores: Tensor, is_finished: Tensor, position: Tensor
    ) -> Tensor:
        """True where an unfinished sequence can still beat a finished one: bool (prompts, 1)."""
        best = ops.max(scores, 1, keepdims=True) / self._length_penalty(position)
        worst = -ops.max(-finished_scores, 1, keepdims=True)
        masked = popxl.constant(MASKED_SCORE, popxl.float32)
        better = ops.greater(best, ops.where(is_finished, worst, masked))
        return ops.cast(ops.max(_cast_to_int32(better), 1, keepdims=True), popxl.bool)

    def _batch_indices(self, beam_idx: Tensor) -> Tensor:
        """Convert beam numbers of a prompt to batch indices: int32 (prompts, beams), same shape."""
        first = np.arange(beam_idx.shape[0])[:, None] * self.strategy.beams
        return beam_idx + popxl.constant(first, popxl.int32, "first_sequences")


def _gather_beams(x: Tensor, index: Tensor, length: int) -> Tensor:
    """Gather the beams `index` of each prompt: (prompts, n * length) -> (prompts, k * length).

    Args:
        index: int32 (prompts, k), the beams to take of a prompt's n.
    """
    prompts, n = x.shape[0], x.shape[1] // length
    first = popxl.constant(np.arange(prompts)[:, None] * n, popxl.int32, "first_rows")
    rows = ops.gather(x.reshape((prompts * n, length)), index + first)
    return rows.reshape((prompts, index.shape[1] * length))


def _cast_to_int32(t: Tensor) -> Tensor:
    return ops.cast(t, popxl.int32)


def _mask_disallowed(allowed: Tensor) -> Tensor:
    """Bias of scores: 0 where `allowed`, else `MASKED_SCORE`; bool -> float32, same shape."""
    zero, masked = (popxl.constant(x, popxl.float32) for x in (0.0, MASKED_SCORE))
    return ops.where(allowed, zero, masked)
