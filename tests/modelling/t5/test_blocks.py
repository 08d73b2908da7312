"""T5's layers against Hugging Face's modules: outputs, gradients of inputs and of weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.modelling.harness import (
    TENSOR_PARALLEL,
    Case,
    run_cases,
    run_reference,
    small_config,
)
from tests.modelling.t5.hf import additive, hf_model

from modelling.t5 import DecoderBlock, Embeddings, EncoderBlock, EncoderHead, Head
from modelling.t5.weights import weight_table

CONFIG = small_config()
MODEL = CONFIG.model
BATCH, ENCODER, DECODER = 3, MODEL.sequence_length, MODEL.decoder_sequence_length
LENGTHS = np.array([ENCODER, 7, 1])
MASK = (np.arange(ENCODER) < LENGTHS[:, None]).astype(np.int32)


def t5_cases() -> dict[str, Case]:
    rng = np.random.default_rng(1)
    hf = hf_model(CONFIG)
    parameters = dict(hf.named_parameters())
    table = weight_table(CONFIG)

    def rand(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    def case(make, phase, reference, inputs, grad, row=0):  # type: ignore[no-untyped-def]
        return Case(make, reference, inputs, table.phases[phase][row], parameters, grad)

    def at(block):  # type: ignore[no-untyped-def]
        return lambda tensor_parallel: block(small_config(tensor_parallel))

    def sliced(tensor_parallel: int) -> EncoderBlock:
        return EncoderBlock(small_config(tensor_parallel, slices=3))

    causal = additive(torch.tril(torch.ones(DECODER, DECODER)))

    def encode(x, mask):  # type: ignore[no-untyped-def]
        return hf.encoder.block[0](x, additive(mask)[:, None, None])[0]

    def decode(x, encoded, mask):  # type: ignore[no-untyped-def]
        return hf.decoder.block[0](
            x,
            causal,
            encoder_hidden_states=encoded,
            encoder_attention_mask=additive(mask)[:, None, None],
        )[0]

    def loss(x, labels, weight):  # type: ignore[no-untyped-def]
        logits = hf.lm_head(hf.decoder.final_layer_norm(x))
        flat = logits.flatten(0, 1), labels.flatten().long()
        return torch.nn.functional.cross_entropy(*flat, reduction="sum") * weight

    words = rng.integers(0, MODEL.embedding.vocab_size, (BATCH, ENCODER), np.int32)
    labels = rng.integers(0, MODEL.embedding.vocab_size, (BATCH, DECODER), np.int32)
    labels[0, 2:] = labels[1] = -100
    wide, narrow = (BATCH, ENCODER, MODEL.hidden_size), (BATCH, DECODER, MODEL.hidden_size)
    encoder = "first_encoder_layer", encode, [rand(*wide), MASK], rand(*wide)
    return {
        "embeddings": case(at(Embeddings), "embeddings", hf.shared, [words], rand(*wide)),
        "encoder": case(at(EncoderBlock), *encoder),
        "encoder in slices": case(sliced, *encoder),
        "encoder head": case(
            at(EncoderHead), "encoder_head", hf.encoder.final_layer_norm, [rand(*wide)], rand(*wide)
        ),
        "decoder": case(
            at(DecoderBlock),
            "first_decoder_layer",
            decode,
            [rand(*narrow), rand(*wide), MASK],
            rand(*narrow),
        ),
        "head": case(
            at(Head), "head", loss, [rand(*narrow), labels, np.float32(0.37)], np.float32(1.5)
        ),
    }


CASES = t5_cases()


@pytest.fixture(scope="module")
def references():
    return {name: run_reference(case) for name, case in CASES.items()}


@pytest.mark.parametrize("tensor_parallel", TENSOR_PARALLEL)
def test_as_hugging_face(tensor_parallel, references):
    results = run_cases(CASES, tensor_parallel)
    errors = {name: results[name].check(references[name]) for name in CASES}
    print(tensor_parallel, {n: f"{e:.1e}" for n, e in errors.items()})
