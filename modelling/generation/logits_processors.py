"""Logits processors of every search: repetition penalty, no repeated n-grams, stop strings.

The first two are processors of transformers' `generate`: the repetition penalty of CTRL (Keskar
et al., arXiv:1909.05858), and the ban of repeated n-grams (Paulus et al., arXiv:1705.04304). As
there, they consider all tokens that the decoder has read, which include the prompt of a
decoder-only model and the start token of an encoder-decoder; beams apply them to log probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import popxl
from modelling.generation.prompts import repeat_interleave
from modelling.generation.stop_strings import StopStringAutomaton
from modelling.layers import ParallelGroups
from popxl import Tensor, ops


@dataclass(frozen=True)
class LogitsProcessors:
    """The logits processors of a search; disabled ones add no ops.

    Attributes:
        repetition_penalty: divides the positive scores of tokens that were read, and multiplies
            the negative ones.
        no_repeat_ngram_size: size of the n-grams that must not occur twice; None: all may.
        stop_strings: the texts that end an answer.
    """

    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int | None = None
    stop_strings: StopStringAutomaton | None = None

    @property
    def needs_history(self) -> bool:
        """True if a processor depends on the earlier tokens."""
        return self.repetition_penalty != 1.0 or self.no_repeat_ngram_size is not None

    def init_state(self, prompt_tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Initial state of the logits processors, which the decoding loop carries.

        Args:
            prompt_tokens: int32 (prompts, n), the tokens before the first new one, padded on the
                left with -1.

        Returns:
            The states of the stop strings, int32 (prompts,), and the prompt tokens; each list is
            empty if no processor needs it.
        """
        stop_states = (
            [] if self.stop_strings is None else [self.stop_strings.init_states(prompt_tokens)]
        )
        return stop_states, [prompt_tokens] if self.needs_history else []

    def split_state(self, state: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Split a search's state: stop-string states, prompt tokens, the strategy's state."""
        stop = int(self.stop_strings is not None)
        end = stop + self.needs_history
        return state[:stop], state[stop:end], state[end:]

    def process_scores(
        self,
        scores: Tensor,
        position: Tensor,
        generated: Tensor,
        history: list[Tensor],
        groups: ParallelGroups,
    ) -> Tensor:
        """Apply the processors to scores: float32 (sequences, local vocabulary) -> same shape.

        Args:
            position: position of the token to choose, int32 scalar.
            generated: int32 (sequences, length), of which the first `position` tokens count.
            history: the prompt tokens, see `init_state`.
        """
        if not self.needs_history:
            return scores
        (prompt_tokens,) = history
        prompt_tokens = repeat_interleave(
            prompt_tokens, generated.shape[0] // prompt_tokens.shape[0]
        )
        seen = _token_history(prompt_tokens, generated, position)
        scores = self._penalize_repetition(scores, _vocabulary_mask(seen, scores, groups))
        if self.no_repeat_ngram_size is None:
            return scores
        repeating = _ngram_repeating_tokens(
            seen, position + prompt_tokens.shape[1], self.no_repeat_ngram_size
        )
        forbidden = popxl.constant(-np.inf, popxl.float32, "forbidden")
        return ops.where(_vocabulary_mask(repeating, scores, groups), forbidden, scores)

    def advance_stop_states(
        self, states: list[Tensor], tokens: Tensor
    ) -> tuple[list[Tensor], Tensor | None]:
        """Advance by one token the automaton that looks for stop strings in each sequence.

        Returns:
            The new states, and a mask of the sequences in which a stop string has ended; None
            without stop strings.
        """
        if self.stop_strings is None:
            return states, None
        state, stopped = self.stop_strings.advance_states(states[0], tokens)
        return [state], stopped

    def _penalize_repetition(self, scores: Tensor, is_repeated: Tensor) -> Tensor:
        if self.repetition_penalty == 1.0:
            return scores
        zero = popxl.constant(0.0, popxl.float32)
        penalized = ops.where(
            ops.greater(zero, scores),
            scores * self.repetition_penalty,
            scores / self.repetition_penalty,
        )
        return ops.where(is_repeated, penalized, scores)


NO_PROCESSORS = LogitsProcessors()


def _token_history(prompt_tokens: Tensor, generated: Tensor, position: Tensor) -> Tensor:
    """Concatenate prompt and generated tokens: int32 (sequences, n + length), -1 for padding."""
    positions = popxl.constant(np.arange(generated.shape[1])[None], popxl.int32, "positions")
    no_token = popxl.constant(-1, popxl.int32)
    is_generated = ops.greater(position, positions)
    return ops.concat([prompt_tokens, ops.where(is_generated, generated, no_token)], 1)


def _vocabulary_mask(tokens: Tensor, scores: Tensor, groups: ParallelGroups) -> Tensor:
    """Mark tokens in the local vocabulary: int32 (sequences, n) -> bool (sequences, local size).

    Args:
        tokens: -1 stands for no token.
    """
    sequences, local_size = scores.shape
    if groups.tensor_parallel > 1:
        # Tokens of other shards are then out of range, which the scatter skips.
        tokens = tokens - groups.tp_rank() * local_size
    ones = popxl.constant(np.ones(tokens.shape), popxl.int32, "ones")
    none = ops.init((sequences, local_size), popxl.int32)
    return ops.cast(ops.scatter_reduce(ones, tokens, "max", none, axis=1), popxl.bool)


def _ngram_repeating_tokens(history: Tensor, count: Tensor, ngram_size: int) -> Tensor:
    """Find tokens that would repeat an n-gram: int32 (sequences, width) -> same shape, else -1.

    A token repeats one if the `ngram_size` - 1 tokens before an earlier occurrence equal the last
    ones. Positions before the first token count as -1, which matches nothing by mistake, since they
    occur once.

    Args:
        count: number of filled columns of `history`, int32 scalar.
    """
    sequences, width = history.shape
    before = popxl.constant(np.full((sequences, ngram_size - 1), -1), popxl.int32, "before")
    padded = ops.concat([before, history], 1) if ngram_size > 1 else history
    matches: Tensor = popxl.constant(np.ones((sequences, width)), popxl.bool, "matches")
    for back in range(1, ngram_size):
        start = ngram_size - 1 - back
        last = ops.dynamic_slice(padded, count + start, [1], [1], no_overlap=True)
        matches = ops.logical_and(matches, ops.equal(padded[:, start : start + width], last))
    return ops.where(matches, history, popxl.constant(-1, popxl.int32))
