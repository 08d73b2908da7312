"""Base classes: searches with one sequence per prompt; strategies without further inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import popxl
from modelling.generation.search import SearchContext, SearchStepResult
from popxl import Tensor, TensorSpec, ops


@dataclass(frozen=True)
class SingleSequenceSearch:
    """A `Search` with one sequence per prompt; subclasses choose the token.

    Its state: the tokens, which sequences are finished, and the state of the logits processors; the
    prompt tokens and the search's inputs do not change.
    """

    context: SearchContext

    def choose_tokens(self, logits: Tensor, position: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Choose next tokens: float32 logits (prompts, local vocabulary) -> int32 (prompts,)."""
        raise NotImplementedError

    def init_state(
        self, is_real_prompt: Tensor, prompt_tokens: Tensor, inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        shape = is_real_prompt.shape[0], self.context.length
        padding = np.full(shape, self.context.special_tokens.pad_token_id)
        tokens = popxl.constant(padding, popxl.int32, "no_tokens")
        stop_states, history = self.context.logits_processors.init_state(prompt_tokens)
        return [tokens, ops.logical_not(is_real_prompt), *stop_states, *history, *inputs]

    def advance(self, logits: Tensor, position: Tensor, state: list[Tensor]) -> SearchStepResult:
        processors, special_tokens = self.context.logits_processors, self.context.special_tokens
        tokens, finished, *processor_state = state
        stop_states, history, inputs = processors.split_state(processor_state)
        logits = self.context.process_scores(logits, position, tokens, history)
        pad = popxl.constant(special_tokens.pad_token_id, popxl.int32, "pad")
        token = ops.where(finished, pad, self.choose_tokens(logits, position, inputs))
        finished = ops.logical_or(finished, special_tokens.is_eos(token))
        stop_states, stopped = processors.advance_stop_states(stop_states, token)
        if stopped is not None:
            finished = ops.logical_or(finished, stopped)
        input_ids = token.reshape((token.shape[0], 1))
        tokens = ops.dynamic_update(tokens, position, input_ids, [1], [1], no_overlap=True)
        return SearchStepResult(
            input_ids, None, [tokens, finished, *stop_states, *history, *inputs]
        )

    def unfinished_prompts(self, state: list[Tensor]) -> Tensor:
        return ops.logical_not(state[1])

    def output_tokens(self, state: list[Tensor]) -> Tensor:
        return state[0]


class StatelessStrategy:
    """Base class of decoding strategies whose search has no inputs besides the logits."""

    def input_specs(self, num_prompts: int, length: int) -> Mapping[str, TensorSpec]:
        return {}

    def input_arrays(self, prompt_indices: np.ndarray, length: int) -> Mapping[str, np.ndarray]:
        return {}
