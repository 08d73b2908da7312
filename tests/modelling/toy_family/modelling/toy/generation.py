"""Generation with the toy: nothing is kept of the positions before."""

from __future__ import annotations

from collections.abc import Sequence

import popxl
from config.toy import ToyConfig
from modelling.generation import (
    SpecialTokens,
    Stack,
    Start,
    Step,
    bind_step,
    last_words,
    what_was_read,
)
from modelling.layers import Groups
from modelling.toy.block import Block, Head
from popxl import Tensor, TensorSpec
from popxl_addons import NamedTensors

SPECIAL_TOKENS = SpecialTokens(end=0, pad=1)


class ToyStack(Stack):
    """All layers."""

    def build(self, x: Tensor) -> Tensor:
        return self.at_one_position(Block(), x, [], lambda _: [])[0]


class ToyStep(Step):
    """See `Step`."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config, Head(config))
        self.layer = ToyStack(config.model.layers)

    def through(
        self, x: Tensor, position: Tensor, caches: Sequence[Tensor], fixed: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """See `Step`."""
        return [self.layer(x)]


class ToyGenerator:
    """See `modelling.generation.Generator`."""

    special = SPECIAL_TOKENS

    def __init__(self, config: ToyConfig, groups: Groups, sequences: int = 1) -> None:
        model = config.model
        self.prompt_length, self.output_length = model.sequence_length, model.output_length
        self.prompts_per_sample = 1
        words = TensorSpec((config.execution.micro_batch_size, 1), popxl.int32)
        self.facts, self._step = ToyStep(config).create_graph(TensorSpec((), popxl.int32), words)

    def begin(self, weights: NamedTensors, words: Tensor, mask: Tensor) -> Start:
        """See `modelling.generation.Generator`."""
        first, _, prompted = last_words(words, mask)
        step = bind_step(self._step, weights, 0, [])
        return Start(step, [], first, prompted, what_was_read(words, mask))
