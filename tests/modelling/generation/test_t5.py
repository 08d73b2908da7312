"""Greedy generation of FLAN-T5 against Hugging Face's, and cached decoding against uncached."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import popxl
from config.t5 import T5Config
from modelling.generation import BeamSearchStrategy, SamplingStrategy
from modelling.layers import LMHeadLoss
from modelling.layers.layer_wrapper import LayerWrapper
from modelling.model_family import get_family
from modelling.t5 import model as t5
from popxl import Tensor
from popxl_addons import NamedTensors
from sessions.generation import GenerationSession
from tests.modelling.generation.harness import (
    PROMPTS,
    check_worth,
    forced_logits,
    hf_beams,
    memory_of_layers,
)
from tests.modelling.generation.t5 import (
    END,
    LAYERS,
    PAD,
    POSITIONS,
    config_of,
    reference,
    reference_model,
)
from tests.modelling.harness import error_of
from tests.modelling.sessions import inference, transposed
from tests.modelling.standalone_modules import (
    StandaloneModule,
    decoder_block,
    encoder_block,
    encoder_final_norm,
    t5_embeddings,
)
from tests.modelling.weight_maps import base_weight_map
from tests.slow import slow


def test_the_reference_is_worth_comparing_with():
    check_worth(reference().tokens, END)


@pytest.mark.parametrize(
    ("dp", "tp", "micro_batch", "iterations", "slices"),
    [slow(1, 1, 64, 1, 1), slow(2, 2, 8, 3, 2), slow(1, 4, 16, 1, 1)],
)
def test_greedy_tokens_are_hugging_faces(dp, tp, micro_batch, iterations, slices):
    """The second layout's last run is not full: 64 prompts, 48 a run. Two have the sequence before
    the batch. By default prompts that share rows and those of `model` are compared."""
    expected = reference()
    config = transposed(config_of(dp, tp, micro_batch, iterations, slices), tp > 1)
    with inference(config) as model:
        model.write(expected.weights)
        tokens = model.generate(expected.input_ids, expected.mask)
    np.testing.assert_array_equal(tokens, expected.tokens)


@pytest.mark.parametrize(("dp", "tp", "iterations", "slices"), [slow(1, 1, 1, 1), (2, 2, 2, 2)])
def test_prompts_that_share_rows_are_answered_alike(dp, tp, iterations, slices):
    """Hugging Face's prompts have a row each: nothing leaks from one prompt to another."""
    expected, places = reference(), 4
    config = config_of(dp, tp, 4, iterations, slices).to_dict()
    config["data"]["examples_per_sample"] = places
    done: list[int] = []
    with inference(T5Config.from_dict(config)) as model:
        model.write(expected.weights)
        tokens = model.generate(expected.input_ids, expected.mask, done.append)
    np.testing.assert_array_equal(tokens, expected.tokens)
    assert sum(done) == PROMPTS
    assert max(done) > 4 * dp * iterations, "no prompts shared a row"


@pytest.fixture(scope="module")
def model() -> Iterator[GenerationSession]:
    """Micro-batches of 16 on one device."""
    with inference(config_of(micro_batch=16)) as model:
        model.write(reference().weights)
        yield model


@pytest.mark.parametrize("count", [0, 1, 15, 17])
def test_any_number_of_samples(model, count):
    """Filling up the last micro-batch changes nothing, nor do the other samples of a batch."""
    expected = reference()
    tokens = model.generate(expected.input_ids[:count], expected.mask[:count])
    np.testing.assert_array_equal(tokens, expected.tokens[:count])


SEARCHED = 20
"""Prompts for beams."""


@cache
def their_beams(beams: int, penalty: float) -> np.ndarray:
    """What Hugging Face's search finds for the first prompts, each by itself."""
    expected, hf = reference(), reference_model()
    prompts = zip(expected.input_ids[:SEARCHED], expected.mask.sum(1), strict=False)
    return np.stack([
        hf_beams(hf, prompt[:n], POSITIONS, beams, penalty, END, PAD) for prompt, n in prompts
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("tp", "beams", "penalty", "places"),
    [
        slow(2, 4, 1.0, 1),
        slow(1, 4, 1.0, 4),  # by default test_streamed.py has it
        slow(1, 3, 0.0, 1),
    ],
)
def test_beams_are_hugging_faces(tp, beams, penalty, places):
    """In the last case several prompts share a row of the encoder, and the sequence comes before
    the batch."""
    expected, theirs = reference(), their_beams(beams, penalty)
    config = config_of(1, tp, 12).to_dict()
    config["data"]["examples_per_sample"] = places
    config = transposed(T5Config.from_dict(config), places > 1)
    with GenerationSession(config, BeamSearchStrategy(beams, penalty)) as model:
        model.write(expected.weights)
        ours = model.generate(expected.input_ids[:SEARCHED], expected.mask[:SEARCHED])
    np.testing.assert_array_equal(ours, theirs)
    assert (theirs != expected.tokens[:SEARCHED]).any(1).sum() > 5


def test_a_seed_gives_the_same_text_however_prompts_are_shared_out():
    expected, strategy = reference(), SamplingStrategy(seed=5, temperature=0.8, top_k=20, top_p=0.9)
    found = []
    for seed, (tp, micro_batch, places) in [
        (5, (1, 64, 1)), (5, (2, 6, 4)), (6, (1, 64, 1)),
    ]:  # fmt: skip
        config = config_of(1, tp, micro_batch).to_dict()
        config["data"]["examples_per_sample"] = places
        config = T5Config.from_dict(config)
        with GenerationSession(config, replace(strategy, seed=seed)) as model:
            model.write(expected.weights)
            found.append(model.generate(expected.input_ids, expected.mask))
    one, packed, other = found
    np.testing.assert_array_equal(one, packed)
    assert (one != other).any(1).mean() > 0.8
    assert (one != expected.tokens).any(1).mean() > 0.8


def test_progress_is_reported(model):
    done: list[int] = []
    model.generate(reference().input_ids[:17], reference().mask[:17], done.append)
    assert done == [16, 1]


def test_prompts_of_another_length_are_refused(model):
    with pytest.raises(ValueError, match=r"mask has shape \(1, 7\).*\(1, 12\)"):
        model.generate(np.ones((1, 12), np.int32), np.ones((1, 7), np.int32))


# ---- caches -------------------------------------------------------------------------------------
def uncached_logits(
    config: T5Config,
    weights: NamedTensors,
    input_ids: Tensor,
    mask: Tensor,
    decoder_input_ids: Tensor,
) -> Tensor:
    """Logits of all positions at once, by the layers that are trained."""

    def run(module, weights, *inputs):
        return module.create_graph(*inputs)[1].bind(weights).call(*inputs)[0]

    def layer(stack, i):
        names = weights.get(f"{stack}.{i}").copy()
        shared = weights.get(f"{stack}.0.layer.0.SelfAttention.relative_attention_bias.weight")
        names.insert("layer.0.SelfAttention.relative_attention_bias.weight", shared, overwrite=True)
        return names

    x = run(t5_embeddings(config), weights.embeddings, input_ids)
    for i in range(LAYERS):
        x = run(encoder_block(config), layer("encoder", i), x, mask)
    encoded = run(encoder_final_norm(config), weights.encoder_head, x)
    x = run(t5_embeddings(config), weights.embeddings, decoder_input_ids)
    for i in range(LAYERS):
        x = run(decoder_block(config), layer("decoder", i), x, encoded, mask)

    class AllLogits(LayerWrapper):
        layer: LMHeadLoss

        def build(self, x: Tensor) -> Tensor:
            return self.layer.compute_logits(x)

    return run(
        StandaloneModule(config, lambda: AllLogits(t5.encoder_decoder_spec(config).head())),
        weights.head,
        x,
    )


@pytest.mark.parametrize("tp", [slow(1), 2])
def test_cached_logits_are_those_of_the_whole_decoder(tp):
    batch, config = 4, config_of(tp=tp, micro_batch=4)
    rng = np.random.default_rng(0)
    forced = rng.integers(2, config.model.embedding.vocab_size, (batch, POSITIONS), np.int32)
    read = np.concatenate([np.full((batch, 1), PAD), forced[:, :-1]], 1)

    def whole(weights: NamedTensors, input_ids: Tensor, mask: Tensor) -> Tensor:
        return uncached_logits(
            config, weights, input_ids, mask, popxl.variable(read.astype(np.int32))
        )

    weight_map = base_weight_map(config)
    cached, uncached = forced_logits(
        config, get_family(config).generator, weight_map, reference(), forced, whole
    )
    parts = uncached.reshape(POSITIONS, tp, batch, POSITIONS, -1)[0]
    assert error_of(cached, np.concatenate(list(parts), -1)) < 1e-5


@pytest.mark.slow  # by default GPT-J's caches are measured so
def test_reading_prompts_keeps_of_each_layer_its_keys_and_values_only():
    """Once, not in the layout of their projection too."""

    def config_with(layers: int) -> T5Config:
        return config_of(layers=layers, decoder_sequence_length=2)

    model = config_of().model
    width = model.attention.heads * model.attention.d_kv
    of_encoder, of_decoder = (2 * 8 * n * width * 4 for n in (model.sequence_length, 2))
    assert memory_of_layers(config_with, 4, 6) < 1.2 * 2 * (of_encoder + of_decoder)
