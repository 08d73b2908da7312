"""Searches that keep one sequence per prompt: what they share in the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import popxl
from modelling.generation.search import Advance, SearchContext
from popxl import Tensor, TensorSpec, ops


@dataclass(frozen=True)
class OneByOne:
    """A `Search` with one sequence for each prompt. Subclasses say how a token is chosen.

    Its state is the tokens, which sequences are complete, and what the rules keep; the inputs and
    what the rules look back at stay.
    """

    context: SearchContext

    def choose(self, logits: Tensor, position: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Choose a token for each prompt: int32 (prompts,). Arguments: see `Search`."""
        raise NotImplementedError

    def start(self, prompted: Tensor, read: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
        rows = [[self.context.special.pad] * self.context.length] * prompted.shape[0]
        tokens = popxl.constant(rows, popxl.int32, "no_tokens")
        stops, stays = self.context.rules.start(read)
        return [tokens, ops.logical_not(prompted), *stops, *stays, *inputs]

    def advance(self, logits: Tensor, position: Tensor, state: list[Tensor]) -> Advance:
        rules, special = self.context.rules, self.context.special
        tokens, finished, *rest = state
        stops, stays, inputs = rules.parts(rest)
        logits = self.context.scores(logits, position, tokens, stays)
        pad = popxl.constant(special.pad, popxl.int32, "pad")
        chosen = ops.where(finished, pad, self.choose(logits, position, inputs))
        finished = ops.logical_or(finished, special.ends(chosen))
        stops, stopped = rules.ended(stops, chosen)
        if stopped is not None:
            finished = ops.logical_or(finished, stopped)
        input_ids = chosen.reshape((chosen.shape[0], 1))
        tokens = ops.dynamic_update(tokens, position, input_ids, [1], [1], no_overlap=True)
        return Advance(input_ids, None, [tokens, finished, *stops, *stays, *inputs])

    def unfinished(self, state: list[Tensor]) -> Tensor:
        return ops.logical_not(state[1])

    def tokens(self, state: list[Tensor]) -> Tensor:
        return state[0]


class WithoutInputs:
    """Common parts of strategies that need nothing but logits."""

    def inputs(self, prompts: int, length: int) -> Mapping[str, TensorSpec]:
        return {}

    def feed(self, prompts: np.ndarray, length: int) -> Mapping[str, np.ndarray]:
        return {}
