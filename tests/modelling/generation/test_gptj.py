"""Greedy generation of GPT-J against Hugging Face's, and cached decoding against their logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from config.gptj import GPTJConfig
from modelling.generation import BeamSearchStrategy
from modelling.model_family import get_family
from sessions.generation import GenerationSession
from tests.modelling.generation.gptj import POSITIONS, config_of, reference, reference_model
from tests.modelling.generation.harness import (
    check_worth,
    forced_logits,
    hf_beams,
    memory_of_layers,
)
from tests.modelling.gptj.hf import END, PAD, VOCABULARY, hf_model, small_config
from tests.modelling.sessions import inference, transposed
from tests.modelling.weight_maps import base_weight_map
from tests.slow import slow


def test_the_reference_is_worth_comparing_with():
    check_worth(reference().tokens, END)


@pytest.mark.parametrize(
    ("dp", "tp", "micro_batch", "slices"),
    [slow(1, 1, 64, 1), slow(1, 2, 64, 1), (2, 2, 24, 2), slow(1, 4, 32, 1)],
)
def test_greedy_tokens_are_hugging_faces(dp, tp, micro_batch, slices):
    """The third layout's second run is not full: 64 prompts, 48 a run. It and the second have the
    sequence before the batch."""
    expected = reference()
    with inference(transposed(config_of(dp, tp, micro_batch, slices), tp == 2)) as model:
        model.write(expected.weights)
        tokens = model.generate(expected.input_ids, expected.mask)
    np.testing.assert_array_equal(tokens, expected.tokens)


@pytest.mark.parametrize(("tp", "beams", "penalty"), [slow(1, 3, 1.0), (2, 4, 2.0)])
def test_beams_are_hugging_faces(tp, beams, penalty):
    expected, hf, count = reference(), reference_model(), 20
    input_ids, mask = expected.input_ids[:count], expected.mask[:count]
    theirs = np.stack([
        hf_beams(hf, prompt[:n], POSITIONS, beams, penalty, END, PAD)
        for prompt, n in zip(input_ids, mask.sum(1), strict=True)
    ])  # fmt: skip
    config = transposed(config_of(1, tp, 12), tp == 2)
    with GenerationSession(config, BeamSearchStrategy(beams, penalty)) as model:
        model.write(expected.weights)
        ours = model.generate(input_ids, mask)
    np.testing.assert_array_equal(ours, theirs)
    assert (theirs != expected.tokens[:count]).any(1).sum() > 5


@pytest.mark.slow  # by default T5's are compared
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (1, 2), (2, 2), (1, 4)])
def test_cached_logits_are_hugging_faces(dp, tp):
    batch, config = 8, config_of(dp, tp, 8)
    forced = np.random.default_rng(0).integers(3, VOCABULARY, (batch, POSITIONS), np.int32)
    expected = reference()
    generator, weight_map = get_family(config).generator, base_weight_map(config)
    ours, _ = forced_logits(config, generator, weight_map, expected, forced, None, dp)
    hf = hf_model(small_config())
    hf.load_state_dict({n: torch.tensor(x) for n, x in expected.weights.items()})
    for i, n in enumerate(expected.mask[:batch].sum(1)):
        whole = np.concatenate([expected.input_ids[i, :n], forced[i, :-1]])
        with torch.no_grad():
            theirs = hf(input_ids=torch.tensor(whole[None]).long()).logits[0, n - 1 :].numpy()
        np.testing.assert_allclose(ours[i], theirs, atol=1e-4)


def test_reading_prompts_keeps_of_each_layer_its_caches_only():
    """Neither other projections nor activations."""

    def config_with(layers: int) -> GPTJConfig:
        return small_config(1, 1, 16, layers=layers, eval=True, output_length=2)

    model = small_config().model
    caches = 2 * 16 * (model.sequence_length + 2) * model.hidden_size * 4
    assert memory_of_layers(config_with, 2, 4) < 1.2 * 2 * caches
