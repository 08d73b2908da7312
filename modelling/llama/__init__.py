"""Llama-shaped decoders: one family, whose configuration says what an architecture does."""

from modelling.llama.block import Block as Block
from modelling.llama.ends import DecoderHead as DecoderHead
from modelling.llama.ends import embeddings as embeddings
