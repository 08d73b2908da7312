"""Answers that begin with a given token, one for each prompt, such as a translation's language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

import popxl
from data.packing import EMPTY_SLOT
from modelling.generation.logits_processors import LogitsProcessors
from modelling.generation.prompts import repeat_interleave
from modelling.generation.search import DecodingStrategy, Search, SearchContext, SearchStepResult
from popxl import Tensor, TensorSpec

FORCED_TOKENS = "forced_tokens"


@dataclass(frozen=True, eq=False)
class ForcedFirstTokens:
    """A `DecodingStrategy` in which the first token of each prompt's answer is given.

    The model's own forced first token is not used.

    Attributes:
        strategy: chooses the other tokens.
        tokens: int32 (prompts,), the first token of the answer to each prompt.
    """

    strategy: DecodingStrategy
    tokens: np.ndarray

    @property
    def sequences_per_prompt(self) -> int:
        return self.strategy.sequences_per_prompt

    @property
    def logits_processors(self) -> LogitsProcessors:
        return self.strategy.logits_processors

    def input_specs(self, num_prompts: int, length: int) -> Mapping[str, TensorSpec]:
        forced = {FORCED_TOKENS: TensorSpec((num_prompts, 1), popxl.int32)}
        return {**self.strategy.input_specs(num_prompts, length), **forced}

    def input_arrays(self, prompt_indices: np.ndarray, length: int) -> Mapping[str, np.ndarray]:
        tokens = np.where(prompt_indices == EMPTY_SLOT, 0, self.tokens[prompt_indices]).astype(
            np.int32
        )
        return {
            **self.strategy.input_arrays(prompt_indices, length),
            FORCED_TOKENS: tokens[:, None],
        }

    def create_search(self, context: SearchContext) -> Search:
        _, last = context.special_tokens.forced_token_ids
        special_tokens = replace(context.special_tokens, forced_token_ids=(None, last))
        context = replace(context, special_tokens=special_tokens)
        return ForcedFirstSearch(
            context, self.strategy.create_search(context), self.sequences_per_prompt
        )


@dataclass(frozen=True)
class ForcedFirstSearch:
    """Wraps a `Search` and forces each answer's first token; these tokens end the search's state.

    Attributes:
        sequences_per_prompt: number of sequences decoded for each prompt.
    """

    context: SearchContext
    search: Search
    sequences_per_prompt: int

    def init_state(
        self, is_real_prompt: Tensor, prompt_tokens: Tensor, inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        *other_inputs, forced = inputs
        return [*self.search.init_state(is_real_prompt, prompt_tokens, other_inputs), forced]

    def advance(self, logits: Tensor, position: Tensor, state: list[Tensor]) -> SearchStepResult:
        *other_state, forced = state
        tokens = repeat_interleave(forced, self.sequences_per_prompt)
        logits = self.context.force_token(logits, tokens, position, 0)
        input_ids, beam_idx, new = self.search.advance(logits, position, other_state)
        return SearchStepResult(input_ids, beam_idx, [*new, forced])

    def unfinished_prompts(self, state: list[Tensor]) -> Tensor:
        return self.search.unfinished_prompts(state[:-1])

    def output_tokens(self, state: list[Tensor]) -> Tensor:
        return self.search.output_tokens(state[:-1])
