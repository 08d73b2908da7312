"""GPT-J's phases in training: those of decoder-only models."""

from __future__ import annotations

from config.gptj import GPTJConfig
from modelling.gptj.block import Block
from modelling.gptj.ends import DecoderHead
from modelling.phases import DecoderOnlyLayout, Settings


def gptj_layout(settings: Settings) -> DecoderOnlyLayout:
    """The phases of GPT-J. See `modelling.phases.training.Layout`."""
    config = settings.config
    assert isinstance(config, GPTJConfig)
    return DecoderOnlyLayout(settings, Block(config), DecoderHead(config))
