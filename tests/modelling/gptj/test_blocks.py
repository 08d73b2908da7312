"""GPT-J's layers against Hugging Face's modules: outputs, gradients of inputs and of weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import popxl
from config.gptj import GPTJConfig
from modelling.decoder import EMBEDDINGS, HEAD, layer_name
from popxl import TensorSpec
from tests.modelling.gptj.hf import hf_model, small_config
from tests.modelling.harness import Case, check_cases, with_fused_attention
from tests.modelling.standalone_modules import gptj_block, gptj_embeddings, gptj_head
from tests.modelling.t5.collectives import collectives
from tests.modelling.weight_maps import base_weight_map
from tests.slow import slow

CONFIG = small_config()
MODEL = CONFIG.model
BATCH, LENGTH = 3, MODEL.sequence_length


def config_of(tensor_parallel: int, slices: int = 1) -> GPTJConfig:
    return small_config(tp=tensor_parallel, slices=slices)


def gptj_cases() -> dict[str, Case]:
    rng = np.random.default_rng(1)
    hf = hf_model(CONFIG)
    parameters = dict(hf.named_parameters())
    weight_map = base_weight_map(CONFIG)
    shape = (BATCH, LENGTH, MODEL.hidden_size)

    def rand(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    def case(make, layer, reference, inputs, grad):
        return Case(make, reference, inputs, weight_map.layers[layer], parameters, grad)

    mask = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)[None, None]
    positions = torch.arange(LENGTH)[None].expand(BATCH, -1)

    def layer(x):
        return hf.transformer.h[1](x, attention_mask=mask, position_ids=positions)[0]

    def loss(x, labels, weight):
        logits = hf.lm_head(hf.transformer.ln_f(x))
        flat = logits.flatten(0, 1), labels.flatten().long()
        return torch.nn.functional.cross_entropy(*flat, reduction="sum") * weight

    input_ids, labels = rng.integers(0, MODEL.embedding.vocab_size, (2, BATCH, LENGTH), np.int32)
    block = layer_name(1), layer, [rand(*shape)], rand(*shape)
    return {
        "embeddings": case(
            lambda tp: gptj_embeddings(config_of(tp)),
            EMBEDDINGS,
            hf.transformer.wte,
            [input_ids],
            rand(*shape),
        ),
        "layer": case(lambda tp: gptj_block(config_of(tp)), *block),
        "layer, fused attention": case(
            lambda tp: gptj_block(with_fused_attention(config_of(tp))), *block
        ),
        "layer, attention in slices": case(lambda tp: gptj_block(config_of(tp, slices=3)), *block),
        "head": case(
            lambda tp: gptj_head(config_of(tp)),
            HEAD,
            loss,
            [rand(*shape), labels, np.float32(0.37)],
            np.float32(1.5),
        ),
    }


CASES = gptj_cases()


@pytest.mark.parametrize("tensor_parallel", [slow(1), slow(2), 4])
def test_as_hugging_face(tensor_parallel):
    check_cases(CASES, tensor_parallel)


def test_a_layer_sums_over_replicas_once_in_each_direction():
    spec = TensorSpec((2, LENGTH, MODEL.hidden_size), popxl.float32)
    config = config_of(2)
    assert collectives(lambda _: gptj_block(config), [spec], gradient=False) == 1
    assert collectives(lambda _: gptj_block(config), [spec], gradient=True) == 2
