"""Generation with Llama-shaped models: that of a decoder alone."""

from __future__ import annotations

from config.llama import LlamaConfig
from modelling.generation import CachedModel, Decode, Prefill, Slots
from modelling.layers import Layers
from modelling.llama.block import Block
from modelling.llama.ends import DecoderHead, embeddings
from modelling.llama.rotary import rotary_tables


class PrefillBlock(Prefill, Block):  # type: ignore[misc]
    """A layer that reads prompts."""


class DecodeBlock(Decode, Block):  # type: ignore[misc]
    """A layer at one position."""


def cached_model(config: LlamaConfig) -> CachedModel:
    """The parts of a model with caches, in the current Ir. `config.model.eval` must be set."""
    model, room = config.model, config.model.output_length
    kinds = list(dict.fromkeys(model.kinds))
    windows = [model.attention.window_of(kind) for kind in kinds]
    return CachedModel(
        prompt=Layers.of(model.kinds, lambda kind: PrefillBlock(config, kind, room)),
        token=Layers.of(model.kinds, lambda kind: DecodeBlock(config, kind, room)),
        head=DecoderHead(config),
        embeddings=lambda: embeddings(config),
        tables=lambda kind, positions: rotary_tables(model, kinds[kind], positions),
        slots=[Slots.of(model.sequence_length, room, window) for window in windows],
    )
