"""Llama-shaped models as the scripts know them."""

from __future__ import annotations

from config.llama import LlamaConfig
from modelling.decoder import Decoder
from modelling.layers import Embeddings, Layers
from modelling.llama.block import Block, CountingBlock, CountingHead, DecoderHead
from modelling.llama.config_json import from_config_json, normalise, to_config_json
from modelling.llama.expert_groups import CountingRoutingBlock, ExpertGroup, RoutingBlock
from modelling.llama.weights import weight_table
from modelling.spec import decoder_family


def decoder(config: LlamaConfig) -> Decoder:
    """A configured model."""
    model = config.model
    groups, counts = config.execution.expert_groups > 1, model.experts.count > 0 and not model.eval
    blocks = (RoutingBlock, CountingRoutingBlock) if groups else (Block, CountingBlock)
    block, head = blocks[counts], (DecoderHead, CountingHead)[counts]
    return Decoder(
        embeddings=lambda: Embeddings(config, model.embedding.scale),
        layers=lambda room: Layers.of(model.kinds, lambda kind: block(config, kind, room)),
        head=lambda: head(config),
        experts=(lambda layer: ExpertGroup(config)) if groups else None,
    )


FAMILY = decoder_family(
    decoder, weight_table, to_config_json, from_config_json, normalise=normalise
)
