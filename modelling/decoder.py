"""A decoder alone, described once: its phases in training, prefill and decode are made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from modelling.layers import Embeddings, Layer, Layers, LMHeadLoss


@dataclass(frozen=True)
class Decoder:
    """What a family says of a model; each part is made anew at each call, in the current Ir.

    Attributes:
        embeddings: its beginning.
        layers: `DecoderLayer`s, for a number of positions after the sequence, which generation has.
        head: its end.
        experts: a group of those of a layer, which has a number, where they are phases of their own
            in training.
    """

    embeddings: Callable[[], Embeddings]
    layers: Callable[[int], Layers]
    head: Callable[[], LMHeadLoss]
    experts: Callable[[int], Layer] | None = None
