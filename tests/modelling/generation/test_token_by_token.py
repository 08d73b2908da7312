"""Tokens that come one by one are those that come at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from modelling.generation import DecodingStrategy, SamplingStrategy
from modelling.generation.greedy_search import GreedyStrategy
from sessions.generation import GenerationSession
from tests.modelling.generation.harness import hf_greedy
from tests.modelling.generation.test_llama import POSITIONS, config_of, ours, reference
from tests.modelling.llama.hf import PAD
from tests.modelling.weight_maps import base_weight_map


def one_by_one(strategy: DecodingStrategy, tp: int, where: str) -> list[list[np.ndarray]]:
    _, weights, input_ids, mask = reference("gemma3_text")
    config = config_of("gemma3_text", tp, where)
    config = replace(config, execution=replace(config.execution, micro_batch_size=1))
    with GenerationSession(config, strategy, token_by_token=True) as model:
        model.write(base_weight_map(config).from_hf(weights))
        with pytest.raises(ValueError, match="mask has shape"):
            next(model.stream(input_ids[:1], mask[:1, :-1]))
        return [[*model.stream(input_ids[i : i + 1], mask[i : i + 1])] for i in range(2)]


def test_tokens_one_by_one_are_those_at_once() -> None:
    """The second prompt begins anew, in a program that has written."""
    model, _, input_ids, mask = reference("gemma3_text")
    expected = hf_greedy(model, input_ids[:2], mask[:2], POSITIONS, PAD)
    for parts, tokens in zip(one_by_one(GreedyStrategy(), 1, "resident"), expected, strict=True):
        np.testing.assert_array_equal(parts[-1][0], tokens)
        for count, part in enumerate(parts, 1):
            np.testing.assert_array_equal(part[0, :count], tokens[:count])
        assert len(parts) == len(tokens) or (parts[-1] != parts[-2]).sum() == 1


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_samples_one_by_one_are_those_at_once(tp: int) -> None:
    strategy = SamplingStrategy(5, 0.9, 20, 0.9)
    first = one_by_one(strategy, tp, "resident")[0]
    np.testing.assert_array_equal(first[-1][0], ours("gemma3_text", tp, strategy)[0])


@pytest.mark.slow
def test_streamed_weights_give_all_tokens_at_once() -> None:
    (parts, _) = one_by_one(GreedyStrategy(), 1, "streamed")
    assert len(parts) == 1
    np.testing.assert_array_equal(parts[0][0], ours("gemma3_text", 1, GreedyStrategy())[0])
