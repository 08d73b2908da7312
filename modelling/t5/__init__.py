"""FLAN-T5: T5 v1.1 with gated GELU and an untied head."""

from modelling.layers import Embeddings as Embeddings
from modelling.t5.blocks import DecoderBlock as DecoderBlock
from modelling.t5.blocks import EncoderBlock as EncoderBlock
from modelling.t5.ends import DecoderHead as DecoderHead
from modelling.t5.ends import EncoderHead as EncoderHead
