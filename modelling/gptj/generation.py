"""Generation with GPT-J, a decoder-only model."""

from __future__ import annotations

from config.gptj import GPTJConfig
from modelling.generation import CachedModel, Decode, Prefill, Slots
from modelling.gptj.attention import rotary_tables
from modelling.gptj.block import Block
from modelling.gptj.ends import DecoderHead
from modelling.layers import Embeddings, Layers


class PrefillBlock(Prefill, Block):  # type: ignore[misc]
    """A layer that reads prompts."""


class DecodeBlock(Decode, Block):  # type: ignore[misc]
    """A layer at one position."""


def cached_model(config: GPTJConfig) -> CachedModel:
    """The parts of a model with caches, in the current Ir. `config.model.eval` must be set."""
    model, order = config.model, [0] * config.model.layers
    return CachedModel(
        prompt=Layers([PrefillBlock(config)], order),
        token=Layers([DecodeBlock(config)], order),
        head=DecoderHead(config),
        embeddings=lambda: Embeddings(config),
        tables=lambda _, positions: rotary_tables(model, positions),
        slots=[Slots.of(model.sequence_length, model.output_length)],
    )
