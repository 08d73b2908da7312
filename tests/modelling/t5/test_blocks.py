"""T5's layers against Hugging Face's modules: outputs, gradients of inputs and of weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from modelling.decoder import EMBEDDINGS, HEAD
from modelling.encoder_decoder import ENCODER_HEAD
from tests.modelling.harness import (
    Case,
    check_cases,
    small_config,
    with_fused_attention,
)
from tests.modelling.standalone_modules import (
    StandaloneModule,
    decoder_block,
    encoder_block,
    encoder_final_norm,
    t5_embeddings,
    t5_head,
)
from tests.modelling.t5.hf import additive, hf_model
from tests.modelling.weight_maps import base_weight_map
from tests.slow import slow

CONFIG = small_config()
MODEL = CONFIG.model
BATCH, ENCODER, DECODER = 3, MODEL.sequence_length, MODEL.decoder_sequence_length
LENGTHS = np.array([ENCODER, 7, 1])
MASK = (np.arange(ENCODER) < LENGTHS[:, None]).astype(np.int32)


def t5_cases() -> dict[str, Case]:
    rng = np.random.default_rng(1)
    hf = hf_model(CONFIG)
    parameters = dict(hf.named_parameters())
    weight_map = base_weight_map(CONFIG)

    def rand(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    def case(make, layer, reference, inputs, grad):
        return Case(make, reference, inputs, weight_map.layers[layer], parameters, grad)

    def at(block):
        return lambda tensor_parallel: block(small_config(tensor_parallel))

    def fused(block):
        return lambda tensor_parallel: block(with_fused_attention(small_config(tensor_parallel)))

    def sliced(tensor_parallel: int) -> StandaloneModule:
        return encoder_block(small_config(tensor_parallel, slices=3))

    causal = additive(torch.tril(torch.ones(DECODER, DECODER)))

    def encode(x, mask):
        return hf.encoder.block[0](x, additive(mask)[:, None, None])[0]

    def decode(x, encoded, mask):
        return hf.decoder.block[0](
            x,
            causal,
            encoder_hidden_states=encoded,
            encoder_attention_mask=additive(mask)[:, None, None],
        )[0]

    def loss(x, labels, weight):
        logits = hf.lm_head(hf.decoder.final_layer_norm(x))
        flat = logits.flatten(0, 1), labels.flatten().long()
        return torch.nn.functional.cross_entropy(*flat, reduction="sum") * weight

    input_ids = rng.integers(0, MODEL.embedding.vocab_size, (BATCH, ENCODER), np.int32)
    labels = rng.integers(0, MODEL.embedding.vocab_size, (BATCH, DECODER), np.int32)
    labels[0, 2:] = labels[1] = -100
    wide, narrow = (BATCH, ENCODER, MODEL.hidden_size), (BATCH, DECODER, MODEL.hidden_size)
    encoder = "encoder.0", encode, [rand(*wide), MASK], rand(*wide)
    pair = [rand(*narrow), rand(*wide), MASK]
    decoder = "decoder.0", decode, pair, rand(*narrow)
    return {
        "embeddings": case(at(t5_embeddings), EMBEDDINGS, hf.shared, [input_ids], rand(*wide)),
        "encoder": case(at(encoder_block), *encoder),
        "encoder in slices": case(sliced, *encoder),
        "fused encoder": case(fused(encoder_block), *encoder),
        "encoder head": case(
            at(encoder_final_norm),
            ENCODER_HEAD,
            hf.encoder.final_layer_norm,
            [rand(*wide)],
            rand(*wide),
        ),
        "decoder": case(at(decoder_block), *decoder),
        "fused decoder": case(fused(decoder_block), *decoder),
        "head": case(
            at(t5_head), HEAD, loss, [rand(*narrow), labels, np.float32(0.37)], np.float32(1.5)
        ),
    }


CASES = t5_cases()


@pytest.mark.parametrize("tensor_parallel", [slow(1), slow(2), 4])
def test_as_hugging_face(tensor_parallel):
    check_cases(CASES, tensor_parallel)
