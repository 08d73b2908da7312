"""T5: FLAN-T5 and T5 v1.1, T5 of 2019, and mT5, which settings tell apart."""

from modelling.layers import Embeddings as Embeddings
from modelling.t5.blocks import DecoderBlock as DecoderBlock
from modelling.t5.blocks import DecoderHead as DecoderHead
from modelling.t5.blocks import EncoderBlock as EncoderBlock
from modelling.t5.blocks import EncoderFinalNorm as EncoderFinalNorm
