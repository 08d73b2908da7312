"""GPT-J as the scripts know it."""

from __future__ import annotations

from config.gptj import GPTJConfig
from modelling.decoder import Decoder
from modelling.gptj.block import Block, DecoderHead
from modelling.gptj.config_json import from_config_json, to_config_json
from modelling.gptj.weights import weight_table
from modelling.layers import Embeddings, Layers
from modelling.spec import decoder_family


def decoder(config: GPTJConfig) -> Decoder:
    """A configured model."""
    return Decoder(
        embeddings=lambda: Embeddings(config),
        layers=lambda room: Layers([Block(config)], [0] * config.model.layers),
        head=lambda: DecoderHead(config),
    )


FAMILY = decoder_family(decoder, weight_table, to_config_json, from_config_json)
