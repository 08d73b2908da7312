"""Collectives of each layer, forwards and backwards, as compiled.

A sharded computation sums once where it closes and, backwards, once for each input it opened with.
"""

from __future__ import annotations

import pytest

import popxl
from popxl import TensorSpec
from tests.modelling.standalone_modules import (
    decoder_block,
    encoder_block,
    encoder_final_norm,
    t5_embeddings,
    t5_head,
)
from tests.modelling.t5.collectives import collectives

WIDE, NARROW = (TensorSpec((2, n, 16), popxl.float32) for n in (12, 4))
WORDS, LABELS = (TensorSpec((2, n), popxl.int32) for n in (12, 4))
LAYERS = {
    # (module, inputs): all-reduces forwards, and more of them backwards
    "embeddings": (t5_embeddings, [WORDS], 1, 0),
    "encoder layer": (encoder_block, [WIDE, WORDS], 2, 2),
    "encoder head": (encoder_final_norm, [WIDE], 0, 0),
    # Cross-attention opens with two inputs, the decoder's and the encoder's.
    "decoder layer": (decoder_block, [NARROW, WIDE, WORDS], 3, 4),
    # The loss exchanges the largest logits, the sums of exponentials and the labels' logits.
    "head": (t5_head, [NARROW, LABELS, TensorSpec((), popxl.float32)], 3, 1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_collectives_of_a_layer(name):
    module, specs, forwards, backwards = LAYERS[name]
    assert collectives(module, specs, gradient=False) == forwards
    assert collectives(module, specs, gradient=True) == forwards + backwards
