"""Generation with GPT-J, a decoder-only model."""

from __future__ import annotations

from config.gptj import GPTJConfig
from modelling.generation import CachedModel, DecoderOnlyGenerator, ReadsOneToken, ReadsPrompts
from modelling.gptj.attention import rotary_tables
from modelling.gptj.block import Block
from modelling.gptj.ends import DecoderHead
from modelling.layers import Embeddings, Groups, Layers


class PromptBlock(ReadsPrompts, Block):  # type: ignore[misc]
    """A layer that reads prompts."""


class TokenBlock(ReadsOneToken, Block):  # type: ignore[misc]
    """A layer at one position."""


class GPTJGenerator(DecoderOnlyGenerator):
    """See `modelling.generation.Generator`."""

    def __init__(self, config: GPTJConfig, groups: Groups, sequences: int = 1) -> None:
        """Create the graphs in the current Ir. `config.model.eval` must be set."""
        order = [0] * config.model.layers
        cached = CachedModel(
            prompt=Layers([PromptBlock(config)], order),
            token=Layers([TokenBlock(config)], order),
            head=DecoderHead(config),
            embeddings=lambda: Embeddings(config),
            tables=lambda _, positions: rotary_tables(config.model, positions),
        )
        super().__init__(config, groups, cached, sequences)
