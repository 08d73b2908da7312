"""Generation layer by layer writes what the resident program writes, which is Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

from config.sections import RunConfig
from modelling.generation import (
    BeamSearchStrategy,
    DecodingStrategy,
    GreedyStrategy,
    SamplingStrategy,
)
from modelling.model_family import get_family
from planning.generation_placement import build_generation_program
from popxl.plan import plan_of
from sessions.generation import GenerationSession
from tests.modelling.generation import gptj, t5
from tests.modelling.generation.test_t5 import SEARCHED, their_beams
from tests.modelling.gptj.hf import small_config
from tests.modelling.sessions import transposed
from tests.slow import slow

OF_T5 = r".*block\.(1.*\.(q|wi_0)|2.*\.[kv])"
OF_GPTJ = r".*h\.1\..*(q_proj|fc_in)"
"""Weights that get adapters."""
SAMPLING = SamplingStrategy(seed=5, temperature=0.8, top_k=20, top_p=0.9)


def config_of(family: ModuleType, dp: int = 1, tp: int = 1) -> RunConfig:
    """64 prompts in two runs of four micro-batches, the last of which are not full."""
    batch = 12 // dp
    if family is t5:
        config = t5.config_of(dp, tp, batch)
    else:
        config = gptj.config_of(dp, tp, batch)
    return transposed(config, tp > 1)


def tokens_of(
    config: RunConfig,
    weights: str,
    strategy: DecodingStrategy,
    own: Mapping[str, np.ndarray] | None = None,
) -> np.ndarray:
    """What is written with the weights on the device ("resident") or "streamed"."""
    family = t5 if config.family == "t5" else gptj
    reference = family.reference()
    generation = replace(config.generation, weights=weights, micro_batches=4)
    config = replace(config, generation=generation)
    with GenerationSession(config, strategy) as model:
        model.write(own or reference.weights)
        return model.generate(reference.input_ids, reference.mask)


@pytest.mark.parametrize(
    ("family", "dp", "tp"),
    [slow(t5, 1, 1), (gptj, 1, 1), slow(t5, 2, 2), slow(gptj, 2, 2)],
)
def test_greedy_tokens_are_hugging_faces(family, dp, tp):
    tokens = tokens_of(config_of(family, dp, tp), "streamed", GreedyStrategy())
    np.testing.assert_array_equal(tokens, family.reference().tokens)


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        (gptj, SAMPLING),
        *(slow(t5, BeamSearchStrategy(3)), slow(t5, SAMPLING), slow(gptj, BeamSearchStrategy(3))),
    ],
)
def test_other_searches_find_the_same(family, strategy):
    config = config_of(family)
    streamed, resident = (tokens_of(config, w, strategy) for w in ("streamed", "resident"))
    np.testing.assert_array_equal(streamed, resident)
    assert (streamed != family.reference().tokens).any(1).sum() > 5


def test_prompts_that_share_rows_and_beams_that_share_prompts():
    config = config_of(t5).to_dict()
    config["data"]["examples_per_sample"] = 4
    config["execution"]["micro_batch_size"] = 4
    config = type(config_of(t5)).from_dict(config)
    tokens = tokens_of(config, "streamed", BeamSearchStrategy(4))
    np.testing.assert_array_equal(tokens[:SEARCHED], their_beams(4, 1.0))


def test_four_bits_stream_packed():
    config = config_of(gptj)
    model = replace(config.model, quantization="int4", quantization_group_size=8)
    config = replace(config, model=model)
    streamed, resident = (tokens_of(config, w, GreedyStrategy()) for w in ("streamed", "resident"))
    np.testing.assert_array_equal(streamed, resident)
    generation = replace(config.generation, weights="streamed")
    config = replace(config, generation=generation)
    program = build_generation_program(config, get_family(config), GreedyStrategy())
    (layer, *_) = program.variables["layer"]
    packed = [v for n, v in layer.fwd.to_dict().items() if n.endswith("packed")]
    assert len(packed) == 4
    assert all(v.dtype.as_numpy() == np.uint16 for v in packed)


@pytest.mark.parametrize(
    ("family", "targets", "where"),
    [
        (t5, OF_T5, "streamed"),
        *(slow(gptj, OF_GPTJ, "resident"), slow(t5, OF_T5, "resident")),
        slow(gptj, OF_GPTJ, "streamed"),
    ],
)
def test_adapters_of_some_layers_give_back_what_weights_lack(family, targets, where):
    """All that is written is Hugging Face's, of layers with adapters and without."""
    adapters = {"adapter.rank": 2, "adapter.targets": targets}
    config, rng = config_of(family).with_values(adapters), np.random.default_rng(1)
    weight_map, weights = get_family(config).weight_map(config), dict(family.reference().weights)
    for adapter in (a for rows in weight_map.layers.values() for row in rows for a in row.adapters):
        (name,) = adapter.weights
        rows, columns = weights[name].shape
        a, b = (0.2 * rng.standard_normal(s, np.float32) for s in ((2, columns), (rows, 2)))
        weights[name] = weights[name] - adapter.scale * b @ a
        weights |= {f"{adapter.module}.lora_A.weight": a, f"{adapter.module}.lora_B.weight": b}
    tokens = tokens_of(config, where, GreedyStrategy(), weights)
    np.testing.assert_array_equal(tokens, family.reference().tokens)
    for name in (name for name in weights if name.endswith("lora_B.weight")):
        weights[name] = np.zeros_like(weights[name])
    assert (tokens_of(config, where, GreedyStrategy(), weights) != tokens).any(1).sum() > 5


def test_the_device_holds_a_layer_at_a_time():
    """More layers take no more of it; the resident program holds all of them."""

    def bytes_of(layers: int, weights: str) -> int:
        config = small_config(1, 1, 4, layers=layers, eval=True, output_length=2)
        generation = replace(config.generation, weights=weights, micro_batches=2)
        config = replace(config, generation=generation)
        return plan_of(
            build_generation_program(config, get_family(config), GreedyStrategy()).ir
        ).device_bytes

    assert bytes_of(4, "streamed") == bytes_of(2, "streamed")
    assert bytes_of(4, "resident") > 1.3 * bytes_of(2, "resident")
