"""Tokens drawn at random have the distribution that transformers' warpers leave."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import popxl
from config.presets import load_config
from config.t5 import T5Config
from modelling.generation import GreedyStrategy, SamplingStrategy, SearchContext, SpecialTokenIds
from modelling.generation.decoding_strategy import strategy_from_config
from modelling.generation.sampling import UNIFORMS, draw_uniforms
from modelling.layers import ParallelGroups
from popxl import ops
from terminal.command_line import read_command_line
from tests.slow import slow

VOCABULARY, DRAWS = 40, 20_000
LOGITS = np.random.default_rng(7).normal(0, 1.5, VOCABULARY).astype(np.float32)
SURE = 80.0
"""Chi-square with at most 39 degrees of freedom is larger once in 8,000 times at most."""


def test_temperature_0_is_greedy() -> None:
    config = load_config(T5Config, "inference", "tiny", {"generation": {"search": "sample"}})
    assert isinstance(strategy_from_config(config), SamplingStrategy)
    assert (
        strategy_from_config(config.with_values({"generation.temperature": 0.0}))
        == GreedyStrategy()
    )
    line = read_command_line("", "inference", "tiny", ["--temperature", "0", "--top_p", "0.5"])
    assert strategy_from_config(line.config) == GreedyStrategy()


def drawn(strategy: SamplingStrategy, tensor_parallel: int) -> np.ndarray:
    """Tokens of many prompts with the same logits: (replicas, DRAWS)."""
    ir = popxl.Ir(replication=tensor_parallel)
    with ir.main_graph:
        groups = ParallelGroups.from_current_ir(tensor_parallel)
        parts = np.stack(np.split(np.tile(LOGITS, (DRAWS, 1)), tensor_parallel, 1))
        data = parts if tensor_parallel > 1 else parts[0]
        logits = popxl.variable(data, replica_grouping=groups.sharded)
        search = strategy.create_search(SearchContext(groups, SpecialTokenIds(-1, -2), 2))
        (uniform,) = strategy.input_arrays(np.arange(DRAWS), 2).values()
        token = search.choose_tokens(
            logits, popxl.constant(1, popxl.int32), [popxl.variable(uniform)]
        )
        out = popxl.d2h_stream((DRAWS,), popxl.int32)
        ops.host_store(out, token)
    with popxl.Session(ir, "cpu") as session:
        return session.run()[out].reshape(-1, DRAWS)


def chances(strategy: SamplingStrategy) -> np.ndarray:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(strategy.temperature)])
    if strategy.top_k:
        warpers.append(TopKLogitsWarper(strategy.top_k))
    if strategy.top_p < 1:
        warpers.append(TopPLogitsWarper(strategy.top_p))
    scores = warpers(torch.zeros((1, 1), dtype=torch.long), torch.tensor(LOGITS[None]))
    return torch.softmax(scores.double(), -1)[0].numpy()


@pytest.mark.parametrize("tp", [slow(1), 2])
@pytest.mark.parametrize(
    "strategy",
    [
        slow(SamplingStrategy(1)),
        SamplingStrategy(2, temperature=0.6),
        slow(SamplingStrategy(3, top_k=7)),
        slow(SamplingStrategy(4, top_p=0.7)),
        SamplingStrategy(5, temperature=1.7, top_k=12, top_p=0.8),
        slow(SamplingStrategy(6, top_k=1000, top_p=1e-6)),
    ],
)
def test_the_distribution_is_that_of_the_warped_logits(strategy, tp):
    tokens = drawn(strategy, tp)
    for replica in tokens[1:]:
        np.testing.assert_array_equal(replica, tokens[0])
    expected = chances(strategy) * DRAWS
    counts = np.bincount(tokens[0], minlength=VOCABULARY)
    assert counts[expected == 0].sum() == 0
    there = expected > 0
    assert (np.square(counts - expected)[there] / expected[there]).sum() < SURE


def test_another_seed_and_another_prompt_give_other_numbers():
    first = draw_uniforms(3, 0, 1000)
    assert first.min() >= 0
    assert first.max() < 1
    assert np.histogram(first, 4, (0, 1))[0].min() > 200
    np.testing.assert_array_equal(first[:10], draw_uniforms(3, 0, 10))
    for other in (draw_uniforms(4, 0, 1000), draw_uniforms(3, 1, 1000)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.1


def test_what_only_fills_a_batch_draws_nothing():
    data = SamplingStrategy(1).input_arrays(np.array([-1, 4]), 3)[UNIFORMS]
    np.testing.assert_array_equal(data, [[0, 0, 0], draw_uniforms(1, 4, 3)])
