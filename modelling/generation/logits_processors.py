"""Rules that hold for every search: tokens that are made less likely, or forbidden, and stop texts.

The first two are processors of transformers' `generate`: the repetition penalty of CTRL (Keskar
et al., arXiv:1909.05858), and n-grams that must not come twice (Paulus et al., arXiv:1705.04304).
As there, they consider all tokens that the decoder has read, which include the prompt of a
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
    """Rules of a search. Those that are not set cost nothing.

    Attributes:
        repetition_penalty: divides the positive scores of tokens that were read, and multiplies
            the negative ones.
        no_repeat_ngram_size: so many tokens in a row must not come twice; None: they may.
        stops: texts that end an answer.
    """

    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int | None = None
    stop_strings: StopStringAutomaton | None = None

    @property
    def needs_history(self) -> bool:
        """Whether they depend on what was read before."""
        return self.repetition_penalty != 1.0 or self.no_repeat_ngram_size is not None

    def start(self, prompt_tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """What a search keeps for them.

        Args:
            read: int32 (prompts, n), what is read before the first choice, -1 in front of it where
                it is shorter.

        Returns:
            The states of the stop texts, int32 (prompts,), and what stays as it is; each an empty
            list if there is no need.
        """
        stops = [] if self.stop_strings is None else [self.stop_strings.start(prompt_tokens)]
        return stops, [prompt_tokens] if self.needs_history else []

    def split_state(self, state: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Split the end of a search's state: the states of the stop texts, what stays, and the
        rest."""
        stops = self.stop_strings is not None
        history = stops + self.needs_history
        return state[:stops], state[stops:history], state[history:]

    def scores(
        self,
        scores: Tensor,
        position: Tensor,
        generated: Tensor,
        history: list[Tensor],
        groups: ParallelGroups,
    ) -> Tensor:
        """The scores of tokens as the rules leave them.

        Args:
            scores: float32 (sequences, part of the vocabulary).
            position: int32 scalar, of the token to be chosen.
            written: int32 (sequences, length), whose first `position` tokens count.
            stays: see `start`.
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
        again = _repeating_tokens(
            seen, position + prompt_tokens.shape[1], self.no_repeat_ngram_size
        )
        never = popxl.constant(-np.inf, popxl.float32, "never")
        return ops.where(_vocabulary_mask(again, scores, groups), never, scores)

    def advance_stops(
        self, states: list[Tensor], tokens: Tensor
    ) -> tuple[list[Tensor], Tensor | None]:
        """The states of the stop texts after a token of each sequence; and whether one has ended,
        None without stop texts."""
        if self.stop_strings is None:
            return states, None
        state, ended = self.stop_strings.step(states[0], tokens)
        return [state], ended

    def _penalize_repetition(self, scores: Tensor, present: Tensor) -> Tensor:
        if self.repetition_penalty == 1.0:
            return scores
        zero = popxl.constant(0.0, popxl.float32)
        less = ops.where(
            ops.greater(zero, scores),
            scores * self.repetition_penalty,
            scores / self.repetition_penalty,
        )
        return ops.where(present, less, scores)


NO_PROCESSORS = LogitsProcessors()


def _token_history(prompt_tokens: Tensor, generated: Tensor, position: Tensor) -> Tensor:
    """All tokens that count: int32 (sequences, n + length), -1 where there is none."""
    here = popxl.constant(np.arange(generated.shape[1])[None], popxl.int32, "positions")
    nothing = popxl.constant(-1, popxl.int32)
    return ops.concat(
        [prompt_tokens, ops.where(ops.greater(position, here), generated, nothing)], 1
    )


def _vocabulary_mask(tokens: Tensor, scores: Tensor, groups: ParallelGroups) -> Tensor:
    """Which tokens of this part of the vocabulary are among `tokens`: bool, as `scores`.

    Args:
        tokens: int32 (sequences, n), -1 for none.
    """
    sequences, part = scores.shape
    if groups.tensor_parallel > 1:
        tokens = tokens - groups.tp_rank() * part  # those of other parts are out of range: left out
    ones = popxl.constant(np.ones(tokens.shape), popxl.int32, "ones")
    none = ops.init((sequences, part), popxl.int32)
    return ops.cast(ops.scatter_reduce(ones, tokens, "max", none, axis=1), popxl.bool)


def _repeating_tokens(seen: Tensor, count: Tensor, size: int) -> Tensor:
    """Tokens that would complete an n-gram which is there already: as `seen`, -1 for none.

    A token would, if the `size` - 1 tokens before one of its places equal those at the end.
    Positions in front of the first token count as -1; that cannot match by mistake, as they precede
    it once.

    Args:
        count: int32 scalar, the columns of `seen` that are filled.
    """
    sequences, width = seen.shape
    before = popxl.constant(np.full((sequences, size - 1), -1), popxl.int32, "before")
    padded = ops.concat([before, seen], 1) if size > 1 else seen
    same: Tensor = popxl.constant(np.ones((sequences, width)), popxl.bool, "same")
    for back in range(1, size):
        start = size - 1 - back
        last = ops.dynamic_slice(padded, count + start, [1], [1], no_overlap=True)
        same = ops.logical_and(same, ops.equal(padded[:, start : start + width], last))
    return ops.where(same, seen, popxl.constant(-1, popxl.int32))
