"""T5Gemma 1 and 2 against Hugging Face's: greedy tokens and beams."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from modelling.generation import BeamSearchStrategy, DecodingStrategy, GreedyStrategy
from sessions.generation import GenerationSession
from tests.modelling.generation.harness import hf_beams
from tests.modelling.t5gemma.hf import (
    ALL_KINDS,
    ENC,
    ENDS,
    PAD,
    VOCABULARY,
    hf_model,
    our_config,
    weights_of,
)
from tests.slow import slow

PROMPTS, POSITIONS = 12, 7


@cache
def prompts() -> tuple[np.ndarray, np.ndarray]:
    """Words and mask, of many lengths."""
    rng = np.random.default_rng(3)
    mask = (np.arange(ENC) < rng.integers(1, ENC + 1, (PROMPTS, 1))).astype(np.int32)
    return np.where(mask, rng.integers(3, VOCABULARY, mask.shape), PAD).astype(np.int32), mask


@cache
def generate_with_hf(kind: str, strategy: DecodingStrategy) -> np.ndarray:
    """Token ids that transformers generates."""
    input_ids, mask = prompts()
    beams = strategy if isinstance(strategy, BeamSearchStrategy) else BeamSearchStrategy(1)
    rows = [
        hf_beams(
            hf_model(kind, True), row[:n], POSITIONS, beams.beams, beams.length_penalty, ENDS, PAD
        )
        for row, n in zip(input_ids, mask.sum(1), strict=True)
    ]
    return np.stack(rows)


def check_tokens(
    kind: str, strategy: DecodingStrategy, dp: int, tp: int, weights: str, places: int
) -> None:
    expected = generate_with_hf(kind, strategy)
    assert len({tuple(row) for row in expected}) >= 4
    assert np.isin(expected, ENDS).any(1).any()
    ends = ",".join(map(str, ENDS))
    fields = {"eval": True, "decoder_sequence_length": POSITIONS, "eos_token_ids": ends}
    config = our_config(kind, dp, tp, 4, **fields)
    generation = replace(config.generation, weights=weights, micro_batches=2)
    data = replace(config.data, examples_per_sample=places)
    config = replace(config, generation=generation, data=data)
    with GenerationSession(config, strategy) as model:
        model.write(weights_of(hf_model(kind, True)))
        np.testing.assert_array_equal(model.generate(*prompts()), expected)


@pytest.mark.parametrize(
    ("kind", "strategy", "tp", "weights", "places"),
    [
        slow("wide encoder", GreedyStrategy(), 2, "resident", 3),
        ("t5gemma2, other sizes", BeamSearchStrategy(3), 1, "streamed", 1),
    ],
)
def test_t5gemma_writes_as_hugging_faces(
    kind: str, strategy: DecodingStrategy, tp: int, weights: str, places: int
) -> None:
    check_tokens(kind, strategy, 1, tp, weights, places)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("strategy", [GreedyStrategy(), BeamSearchStrategy(3, 0.7)])
@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize(("dp", "tp", "places"), [(1, 1, 1), (2, 2, 1), (1, 2, 4)])
def test_every_kind_writes_as_hugging_faces(
    kind: str, strategy: DecodingStrategy, weights: str, dp: int, tp: int, places: int
) -> None:
    check_tokens(kind, strategy, dp, tp, weights, places)
