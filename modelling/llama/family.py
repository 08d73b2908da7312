"""Llama-shaped models as the scripts know them."""

from __future__ import annotations

from config.llama import LlamaConfig
from modelling.decoder import Decoder
from modelling.layers import Embeddings, Layers
from modelling.llama.block import BalancedBlock, BalancedHead, Block, DecoderHead
from modelling.llama.config_json import from_config_json, normalise, to_config_json
from modelling.llama.expert_groups import BalancedRoutingBlock, ExpertGroup, RoutingBlock
from modelling.llama.weights import weight_table
from modelling.spec import decoder_family


def decoder(config: LlamaConfig) -> Decoder:
    """A configured model."""
    model = config.model
    balanced = model.experts.balance > 0 and not model.eval
    groups = config.expert_groups > 1
    blocks = (RoutingBlock, BalancedRoutingBlock) if groups else (Block, BalancedBlock)
    block, head = blocks[balanced], (DecoderHead, BalancedHead)[balanced]
    return Decoder(
        embeddings=lambda: Embeddings(config, model.embedding.scale),
        layers=lambda room: Layers.of(model.kinds, lambda kind: block(config, kind, room)),
        head=lambda: head(config),
        experts=(lambda: ExpertGroup(config)) if groups else None,
    )


FAMILY = decoder_family(
    decoder, weight_table, to_config_json, from_config_json, normalise=normalise
)
