"""Mixtures whose frozen experts are in few bits, beside adapters of attention and in generation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from config.llama import LlamaConfig
from modelling.model_family import get_family
from sessions.generation import GenerationSession
from tests.modelling.llama.hf import LENGTH, VOCABULARY, hf_config, hf_model, our_config, weights_of
from tests.modelling.llama.training import batches
from tests.modelling.rounding import fake_quantize_weight
from tests.modelling.sessions import fine_tuning
from tests.modelling.weight_maps import base_weight_map
from tests.slow import slow

SIZE = 4
WHOLE = ("embed_tokens", "lm_head", "router", "mlp.gate.", "moe.gate.", "shared_expert_gate")


def base_of(config: LlamaConfig, hf_cfg: Any) -> dict[str, np.ndarray]:
    return dict(base_weight_map(config).from_hf(weights_of(hf_model(hf_cfg))))


def fake_quantized(base: dict[str, np.ndarray], bits: int) -> dict[str, np.ndarray]:
    """The base with what is left of matrices that are not to be whole: experts' among them."""
    packed = {n for n, w in base.items() if w.ndim == 2 and not any(x in n for x in WHOLE)}
    assert sum(".experts." in name for name in packed) > 10
    return {n: fake_quantize_weight(w, SIZE, bits) if n in packed else w for n, w in base.items()}


@pytest.mark.parametrize(
    ("kind", "dp", "tp", "bits", "expert_parallel"),
    [
        ("gpt_oss", 1, 2, 4, False),
        slow("qwen3_moe", 1, 2, 4, True),
        slow("qwen2_moe", 2, 1, 8, False),
        slow("mixtral", 2, 2, 4, False),
    ],
)
def test_training_beside_packed_experts_is_that_beside_expanded_ones_bit_for_bit(
    kind: str, dp: int, tp: int, bits: int, expert_parallel: bool
) -> None:
    hf_cfg = hf_config(kind, num_hidden_layers=1)
    fields = {"adapter.rank": 4, "execution.expert_parallel": expert_parallel}
    config = our_config(hf_cfg, dp, tp, 2).with_values(fields)
    base, given = base_of(config, hf_cfg), batches(2)
    packed = {"model.quantization": f"int{bits}", "model.quantization_group_size": SIZE}
    found = []
    for fields, weights in (({}, fake_quantized(base, bits)), (packed, base)):
        model = fine_tuning(config.with_values(fields))
        model.write({**get_family(config).weight_map(config).init_weights(0), **weights})
        with model:
            losses = [model.run([given[i]], [1e-2], i)[0].loss for i in range(2)]
            found.append((losses, dict(model.tensors(frozen=False))))
    (losses, plain), (packed_losses, trained) = found
    assert packed_losses == losses
    assert any("lora_B" in name for name in plain)
    assert all(trained[name].tobytes() == array.tobytes() for name, array in plain.items())


@pytest.mark.slow
def test_generation_from_packed_experts_is_that_from_expanded_ones() -> None:
    hf_cfg = hf_config("gpt_oss")
    config = our_config(hf_cfg, 1, 2, 4, eval=True, output_length=6)
    base = base_of(config, hf_cfg)
    input_ids = np.random.default_rng(0).integers(3, VOCABULARY, (4, LENGTH), np.int32)
    mask = np.ones_like(input_ids)
    packed = {"model.quantization": "int4", "model.quantization_group_size": SIZE}
    found = []
    for fields, weights in (({}, fake_quantized(base, 4)), (packed, base), ({}, base)):
        with GenerationSession(config.with_values(fields)) as model:
            model.write(weights)
            found.append(model.generate(input_ids, mask))
    np.testing.assert_array_equal(found[1], found[0])
    assert (found[2] != found[0]).any()  # rounding is seen
