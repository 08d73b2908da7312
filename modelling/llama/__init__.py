"""Llama-shaped decoders: one family, whose configuration says what an architecture does."""

from modelling.llama.block import Block as Block
from modelling.llama.block import DecoderHead as DecoderHead
