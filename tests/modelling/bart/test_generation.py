"""BART against Hugging Face's: greedy tokens and beams, with tokens that are forced."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from huggingface.generation_config import DECODER_TOKENS
from modelling.generation import BeamSearchStrategy, DecodingStrategy, GreedyStrategy
from modelling.generation.forced_tokens import ForcedFirstTokens
from sessions.generation import GenerationSession
from tests.modelling.bart.hf import (
    BOS,
    ENC,
    END,
    KINDS,
    PAD,
    VOCABULARY,
    buffers_of,
    hf_model,
    our_config,
    settings_of,
    weights_of,
)
from tests.modelling.generation.harness import hf_beams
from tests.slow import slow

PROMPTS, POSITIONS = 12, 7
END_BIAS = 1.0


@cache
def prompts() -> tuple[np.ndarray, np.ndarray]:
    """Words and mask, of many lengths."""
    rng = np.random.default_rng(3)
    mask = (np.arange(ENC) < rng.integers(1, ENC + 1, (PROMPTS, 1))).astype(np.int32)
    return np.where(mask, rng.integers(3, VOCABULARY, mask.shape), PAD).astype(np.int32), mask


@cache
def model_of(kind: str) -> Any:
    """The reference, which ends some of its answers."""
    model = hf_model(kind, writing=True)
    with torch.no_grad():
        for bias in buffers_of(model).values():
            bias[0, END] += END_BIAS
    settings = settings_of(kind)
    for name in DECODER_TOKENS:
        setattr(model.generation_config, name, settings[name])
    if settings["model_type"] == "marian":  # as its generation_config.json, for a likely padding
        model.generation_config.bad_words_ids = [[PAD]]
        with torch.no_grad():
            model.final_logits_bias[0, PAD] += 9
    return model


@cache
def generate_with_hf(
    kind: str, strategy: DecodingStrategy, forced: tuple[int, ...] = ()
) -> np.ndarray:
    """Token ids that transformers generates.

    Args:
        forced: first token of each prompt's answer; empty: that of the kind.
    """
    input_ids, mask = prompts()
    beams = strategy if isinstance(strategy, BeamSearchStrategy) else BeamSearchStrategy(1)
    model, rows = model_of(kind), []
    usual = model.generation_config.forced_bos_token_id
    for i, (row, n) in enumerate(zip(input_ids, mask.sum(1), strict=True)):
        model.generation_config.forced_bos_token_id = forced[i] if forced else usual
        rows.append(
            hf_beams(model, row[:n], POSITIONS, beams.beams, beams.length_penalty, END, PAD)
        )
    model.generation_config.forced_bos_token_id = usual
    return np.stack(rows)


def check_tokens(
    kind: str,
    strategy: DecodingStrategy,
    dp: int,
    tp: int,
    weights: str,
    places: int,
    forced: tuple[int, ...] = (),
) -> None:
    expected = generate_with_hf(kind, strategy, forced)
    if forced:
        strategy = ForcedFirstTokens(strategy, np.asarray(forced))
    assert kind not in KINDS or len({tuple(row) for row in expected}) >= 4
    config = our_config(kind, dp, tp, 4, eval=True, decoder_sequence_length=POSITIONS)
    generation = replace(config.generation, weights=weights, micro_batches=2)
    data = replace(config.data, examples_per_sample=places)
    config = replace(config, generation=generation, data=data)
    with GenerationSession(config, strategy) as model:
        model.write(weights_of(model_of(kind)))
        np.testing.assert_array_equal(model.generate(*prompts()), expected)


def test_forced_tokens_begin_and_end_answers() -> None:
    expected = generate_with_hf("as published", GreedyStrategy())
    assert (expected[:, 0] == BOS).all()
    assert ((expected == END).sum(1) == 1).all()


@pytest.mark.parametrize(
    ("strategy", "tp", "weights", "places"),
    [(GreedyStrategy(), 2, "resident", 3), slow(BeamSearchStrategy(3), 1, "streamed", 1)],
)
def test_bart_writes_as_hugging_faces(
    strategy: DecodingStrategy, tp: int, weights: str, places: int
) -> None:
    check_tokens("as published", strategy, 1, tp, weights, places)


@pytest.mark.parametrize(
    ("strategy", "dp", "tp", "weights", "places"),
    [
        (GreedyStrategy(), 1, 2, "resident", 3),
        pytest.param(BeamSearchStrategy(3), 1, 2, "streamed", 1, marks=pytest.mark.slow),
        pytest.param(BeamSearchStrategy(2), 2, 1, "resident", 3, marks=pytest.mark.slow),
        pytest.param(GreedyStrategy(), 2, 2, "streamed", 3, marks=pytest.mark.slow),
    ],
)
def test_each_answer_begins_with_its_own_token(
    strategy: DecodingStrategy, dp: int, tp: int, weights: str, places: int
) -> None:
    forced = tuple(np.random.default_rng(5).integers(3, VOCABULARY, PROMPTS).tolist())
    check_tokens("as published", strategy, dp, tp, weights, places, forced)


@pytest.mark.parametrize(
    ("kind", "weights", "places"),
    [("m2m_100", "resident", 4), slow("two vocabularies", "streamed", 1)],
)
def test_relatives_write_as_hugging_faces(kind: str, weights: str, places: int) -> None:
    check_tokens(kind, GreedyStrategy(), 1, 1, weights, places)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", [GreedyStrategy(), BeamSearchStrategy(3, 0.7)])
@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize(("dp", "tp", "places"), [(1, 1, 1), (2, 2, 1), (1, 2, 4)])
def test_every_kind_writes_as_hugging_faces(
    kind: str, strategy: DecodingStrategy, weights: str, dp: int, tp: int, places: int
) -> None:
    check_tokens(kind, strategy, dp, tp, weights, places)
