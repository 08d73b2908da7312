"""Sampling: draw the next token at random, with temperature, top-k and top-p.

The order is that of transformers: temperature, then the `top_k` likeliest
tokens, then the likeliest ones that have the probability `top_p` together (the nucleus of Holtzman
et al., arXiv:1904.09751).

A token is drawn by inverting the distribution function at one uniform number, which is a function
of the seed, the prompt's number and the position. So a text does not depend on batches and devices,
apart from the rounding of the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import popxl
from modelling.generation.logits_processors import NO_PROCESSORS, LogitsProcessors
from modelling.generation.search import SearchContext
from modelling.generation.single_sequence import SingleSequenceSearch
from popxl import Tensor, TensorSpec, ops

UNIFORMS = "uniforms"


@dataclass(frozen=True)
class SamplingStrategy:
    """Settings of sampling, from which a program creates its `SamplingSearch`.

    Attributes:
        seed: seed of all random numbers.
        temperature: divisor of the logits.
        top_k: number of likeliest tokens to draw from; None: all.
        top_p: draw from the likeliest tokens that have this probability together.
    """

    seed: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    logits_processors: LogitsProcessors = NO_PROCESSORS

    sequences_per_prompt = 1

    def input_specs(self, num_prompts: int, length: int) -> Mapping[str, TensorSpec]:
        return {UNIFORMS: TensorSpec((num_prompts, length), popxl.float32)}

    def input_arrays(self, prompt_indices: np.ndarray, length: int) -> Mapping[str, np.ndarray]:
        drawn = np.zeros((len(prompt_indices), length), np.float32)
        for row, prompt in zip(drawn, prompt_indices, strict=True):
            if prompt >= 0:
                row[:] = draw_uniforms(self.seed, int(prompt), length)
        return {UNIFORMS: drawn}

    def create_search(self, context: SearchContext) -> SamplingSearch:
        return SamplingSearch(context, self)


def draw_uniforms(seed: int, prompt_index: int, length: int) -> np.ndarray:
    """Draw a number from the uniform distribution on [0, 1) for each token: float32 (length,).

    Raw output of the Philox generator, which numpy guarantees to stay the same.
    """
    bits = np.random.Philox(np.random.SeedSequence([seed, prompt_index])).random_raw(length)
    return ((bits >> np.uint64(40)) / np.float64(2**24)).astype(np.float32)


@dataclass(frozen=True)
class SamplingSearch(SingleSequenceSearch):
    """Draws one token per prompt from uniform random numbers, float32 (prompts, length)."""

    strategy: SamplingStrategy

    def choose_tokens(self, logits: Tensor, position: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        strategy, (uniform,) = self.strategy, inputs
        logits = self.context.gather_vocabulary(logits) / strategy.temperature
        batch, vocabulary = logits.shape
        k = min(strategy.top_k or vocabulary, vocabulary)
        tokens = None
        if k < vocabulary or strategy.top_p < 1:
            logits, tokens = ops.topk(logits, k, 1, largest=True, sorted=True)
        probabilities = ops.softmax(logits, 1)
        if strategy.top_p < 1:
            before = ops.cumsum(probabilities, 1) - probabilities
            nucleus = ops.greater(popxl.constant(strategy.top_p, popxl.float32), before)
            probabilities = ops.where(nucleus, probabilities, popxl.constant(0.0, popxl.float32))
        drawn = ops.dynamic_slice(uniform, position, [1], [1], no_overlap=True)
        index = _sample_inverse_cdf(ops.cumsum(probabilities, 1), drawn)
        if tokens is None:
            return index
        rows = popxl.constant(np.arange(batch) * k, popxl.int32, "rows")
        return ops.gather(tokens.reshape((batch * k,)), rows + index)


def _sample_inverse_cdf(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """Token index that a uniform number selects: (batch, n), (batch, 1) -> int32 (batch,).

    That is the index of the token whose interval `uniforms` lies in: int32 (batch,).
    """
    total = ops.max(cumulative, 1, keepdims=True)
    passed = ops.logical_not(ops.greater(cumulative, total * uniforms))
    # The product may round up to the total, and the last tokens may have no weight.
    possible = ops.greater(total, cumulative)
    return ops.sum(ops.cast(ops.logical_and(passed, possible), popxl.int32), 1)
