"""Searches that keep one sequence per prompt: what they share in the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import popxl
from modelling.generation.search import SearchContext, SearchStep
from popxl import Tensor, TensorSpec, ops


@dataclass(frozen=True)
class SingleSequenceSearch:
    """A `Search` with one sequence for each prompt. Subclasses say how a token is chosen.

    Its state is the tokens, which sequences are complete, and what the rules keep; the inputs and
    what the rules look back at stay.
    """

    context: SearchContext

    def choose(self, logits: Tensor, position: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Choose a token for each prompt: int32 (prompts,). Arguments: see `Search`."""
        raise NotImplementedError

    def start(
        self, has_prompt: Tensor, prompt_tokens: Tensor, inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        rows = [
            [self.context.special_tokens.pad_token_id] * self.context.length
        ] * has_prompt.shape[0]
        tokens = popxl.constant(rows, popxl.int32, "no_tokens")
        stop_states, history = self.context.processors.start(prompt_tokens)
        return [tokens, ops.logical_not(has_prompt), *stop_states, *history, *inputs]

    def advance(self, logits: Tensor, position: Tensor, state: list[Tensor]) -> SearchStep:
        processors, special_tokens = self.context.processors, self.context.special_tokens
        tokens, finished, *rest = state
        stop_states, history, inputs = processors.split_state(rest)
        logits = self.context.scores(logits, position, tokens, history)
        pad = popxl.constant(special_tokens.pad_token_id, popxl.int32, "pad")
        chosen = ops.where(finished, pad, self.choose(logits, position, inputs))
        finished = ops.logical_or(finished, special_tokens.is_end(chosen))
        stop_states, stopped = processors.advance_stops(stop_states, chosen)
        if stopped is not None:
            finished = ops.logical_or(finished, stopped)
        input_ids = chosen.reshape((chosen.shape[0], 1))
        tokens = ops.dynamic_update(tokens, position, input_ids, [1], [1], no_overlap=True)
        return SearchStep(input_ids, None, [tokens, finished, *stop_states, *history, *inputs])

    def unfinished(self, state: list[Tensor]) -> Tensor:
        return ops.logical_not(state[1])

    def tokens(self, state: list[Tensor]) -> Tensor:
        return state[0]


class StatelessStrategy:
    """Common parts of strategies that need nothing but logits."""

    def inputs(self, prompts: int, length: int) -> Mapping[str, TensorSpec]:
        return {}

    def input_arrays(self, prompts: np.ndarray, length: int) -> Mapping[str, np.ndarray]:
        return {}
