"""The toy's phases in training."""

from __future__ import annotations

from modelling.phases import DecoderOnlyLayout, Settings
from modelling.toy.block import Block, Head


def toy_layout(settings: Settings) -> DecoderOnlyLayout:
    """See `modelling.phases.training.Layout`."""
    return DecoderOnlyLayout(settings, Block(), Head(settings.config))
