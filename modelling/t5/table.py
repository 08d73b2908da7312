"""T5's table of weights, and the record of the family."""

from __future__ import annotations

from config.t5 import T5Config
from modelling.layers import Module
from modelling.layers.module import rows_of
from modelling.layers.run_config import configured
from modelling.t5.model import (
    EncoderFinalNorm,
    T5DecoderBlock,
    T5EncoderBlock,
    embeddings,
    head,
)
from modelling.weights import WeightTable
from modelling.weights.hf_files import FileNames

EMBEDDINGS = "embeddings"
ENCODER_HEAD = "encoder_head"
HEAD = "head"
WORDS, LOGITS = "shared.weight", "lm_head.weight"
ALIASES = {f"{stack}.embed_tokens.weight": WORDS for stack in ("encoder", "decoder")}


def encoder_layer(index: int) -> str:
    """Name of a layer of the encoder."""
    return f"encoder.{index}"


def decoder_layer(index: int) -> str:
    """Name of a layer of the decoder."""
    return f"decoder.{index}"


def weight_table(config: T5Config) -> WeightTable:
    """Derive the table of the configured model.

    The decoder's embeddings have no weights of their own, nor has a head that is tied to them, and
    of each stack the first layer alone has relative positions.
    """
    c = config.model
    encoder = tuple(map(encoder_layer, range(c.layers)))
    decoder = tuple(map(decoder_layer, range(c.decoder_depth)))
    parts: dict[str, tuple[Module, str]] = {}
    with configured(config):
        parts[EMBEDDINGS] = embeddings(), ""
        first, other = (T5EncoderBlock(c, is_first) for is_first in (True, False))
        for i, name in enumerate(encoder):
            parts[name] = other if i else first, f"encoder.block.{i}"
        parts[ENCODER_HEAD] = EncoderFinalNorm(c), ""
        begin, later = (T5DecoderBlock(c, is_first) for is_first in (True, False))
        for i, name in enumerate(decoder):
            parts[name] = later if i else begin, f"decoder.block.{i}"
        parts[HEAD] = head(config), ""
    phases = {
        "embeddings": (EMBEDDINGS,),
        "first_encoder_layer": encoder[:1],
        "encoder_block": encoder[1:],
        "encoder_head": (ENCODER_HEAD,),
        "first_decoder_layer": decoder[:1],
        "decoder_block": decoder[1:],
        "head": (HEAD,),
    }
    layers = {name: tuple(rows_of(module, path)) for name, (module, path) in parts.items()}
    aliases = ALIASES | ({LOGITS: WORDS} if config.tied else {})
    return WeightTable(layers, phases, config.execution.tensor_parallel, FileNames(aliases))
