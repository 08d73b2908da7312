"""Generation with the toy: nothing is kept of the positions before."""

from __future__ import annotations

from collections.abc import Sequence

import popxl
from config.toy import ToyConfig
from modelling.generation import (
    Search,
    SpecialTokens,
    Stack,
    Step,
    bind_step,
    decode,
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

    def build(self, position: Tensor, words: Tensor) -> Tensor:
        """words: int32 (batch, 1) -> float32 (batch, part of the vocabulary)."""
        return self.logits(self.layer(self.embedded(words)))


class ToyGenerator:
    """See `modelling.generation.Generator`."""

    special = SPECIAL_TOKENS

    def __init__(self, config: ToyConfig, groups: Groups, sequences: int = 1) -> None:
        model = config.model
        self.prompt_length, self.output_length = model.sequence_length, model.output_length
        self.prompts_per_sample = 1
        self._groups = groups
        words = TensorSpec((config.execution.micro_batch_size, 1), popxl.int32)
        self.facts, self._step = ToyStep(config).create_graph(TensorSpec((), popxl.int32), words)

    def generate(
        self,
        weights: NamedTensors,
        words: Tensor,
        mask: Tensor,
        search: Search,
        inputs: Sequence[Tensor],
    ) -> Tensor:
        """See `modelling.generation.Generator`."""
        first, _, prompted = last_words(words, mask)
        return decode(
            bind_step(self._step, weights, 0, []),
            [],
            first,
            prompted,
            what_was_read(words, mask),
            self.output_length,
            search,
            inputs,
            self._groups,
        )
