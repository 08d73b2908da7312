"""The phases of Llama-shaped models in training: those of decoder-only models."""

from __future__ import annotations

from config.llama import LlamaConfig
from modelling.layers import Layers
from modelling.llama.block import Block
from modelling.llama.ends import DecoderHead, embeddings
from modelling.phases import DecoderOnlyLayout, Settings


def llama_layout(settings: Settings) -> DecoderOnlyLayout:
    """The phases of a model. See `modelling.phases.training.Layout`."""
    config = settings.config
    assert isinstance(config, LlamaConfig)
    layers = Layers.of(config.model.kinds, lambda kind: Block(config, kind))
    return DecoderOnlyLayout(settings, layers, DecoderHead(config), embeddings(config))
