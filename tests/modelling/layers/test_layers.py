"""Layers against torch: outputs, gradients of inputs and of weights, at each tensor parallelism."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from config.gptj import GPTJConfig
from data.samples import IGNORE_INDEX
from modelling.layers import (
    ActivationLayout,
    Attention,
    AttentionSpec,
    LMHead,
    RMSNorm,
    VocabularyEmbedding,
    padding_bias,
)
from modelling.layers.dropout import Dropout
from modelling.objectives import CrossEntropy
from modelling.weights import Weight, WeightMapping
from popxl import Tensor
from tests.modelling.harness import Case, check_cases
from tests.modelling.layers.t5_feed_forward import feed_forward
from tests.modelling.standalone_modules import StandaloneModule
from tests.slow import slow

HIDDEN, INNER, VOCABULARY = 8, 8, 41  # 41: the last shard of the vocabulary is padded
RNG = np.random.default_rng(2)


def rand(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


class TokenLoss(LMHead):
    """The head with its loss."""

    def build(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        logits, layout = super().build(x), ActivationLayout()
        return CrossEntropy(self.config).loss_stats(logits, {"labels": labels}, layout, self.groups)


class MaskedAttention(Attention):
    """Attention with a bias and padding."""

    def build(self, q, k, v, bias, mask):  # type: ignore[override]
        return super().build(q, k, v, [bias, padding_bias(mask)])


def parameters(**arrays: np.ndarray) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(x, requires_grad=True) for name, x in arrays.items()}


def config_of(tensor_parallel: int, label_smoothing: float = 0.0) -> GPTJConfig:
    vocabulary = {"embedding": {"vocab_size": VOCABULARY}, "eos_token_id": 1, "pad_token_id": 1}
    model = {"hidden_size": HIDDEN, "attention": {"heads": 4, "rotary_dim": 2}} | vocabulary
    training = {"label_smoothing": label_smoothing}
    config = GPTJConfig.from_dict({"family": "gptj", "model": model, "training": training})
    execution = replace(config.execution, tensor_parallel=tensor_parallel)
    object.__setattr__(config, "execution", execution)  # configurations refuse a padded vocabulary
    return config


def norm_case() -> Case:
    p = parameters(w=1 + 0.1 * rand(HIDDEN))

    def reference(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (HIDDEN,), p["w"], 1e-3)

    rows = [WeightMapping("weight", (Weight("w", (HIDDEN,)),))]

    def make(tp: int) -> StandaloneModule:
        return StandaloneModule(config_of(tp), lambda: RMSNorm(HIDDEN, 1e-3))

    return Case(make, reference, [rand(3, HIDDEN)], rows, p, rand(3, HIDDEN))


def feed_forward_case() -> Case:
    p = parameters(wi_0=rand(INNER, HIDDEN), wi_1=rand(INNER, HIDDEN), wo=rand(HIDDEN, INNER))

    def reference(x: torch.Tensor) -> torch.Tensor:
        gate = torch.nn.functional.gelu(x @ p["wi_0"].T, approximate="tanh")
        return (gate * (x @ p["wi_1"].T)) @ p["wo"].T

    wi = tuple(Weight(f"wi_{i}", (INNER, HIDDEN)) for i in range(2))
    rows = [
        WeightMapping("wi_all.weight", wi, transpose=True, axis=1),
        WeightMapping("wo.weight", (Weight("wo", (HIDDEN, INNER)),), transpose=True, axis=0),
    ]

    def make(tp: int) -> StandaloneModule:
        return feed_forward(HIDDEN, INNER, 8.0, tp)

    return Case(make, reference, [rand(2, 3, HIDDEN)], rows, p, rand(2, 3, HIDDEN))


def embedding_case() -> Case:
    p = parameters(w=rand(VOCABULARY, HIDDEN))
    tokens = np.array([[0, 40, 11], [10, 11, 21]], np.int32)  # ends and borders of the shards

    def make(tp: int) -> StandaloneModule:
        return StandaloneModule(config_of(tp), lambda: VocabularyEmbedding(1.0, "w"))

    rows = [WeightMapping("weight", (Weight("w", (VOCABULARY, HIDDEN)),), axis=0)]
    return Case(make, lambda t: p["w"][t], [tokens], rows, p, rand(2, 3, HIDDEN))


def lm_head_case(label_smoothing: float = 0.0) -> Case:
    p = parameters(w=rand(VOCABULARY, HIDDEN))
    labels = np.array([0, 40, 11, IGNORE_INDEX, 20], np.int32)

    def reference(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(
            x @ p["w"].T, labels.long(), reduction="sum", label_smoothing=label_smoothing
        )

    rows = [WeightMapping("weight", (Weight("w", (VOCABULARY, HIDDEN)),), transpose=True, axis=1)]

    def make(tp: int) -> StandaloneModule:
        return StandaloneModule(config_of(tp, label_smoothing), lambda: TokenLoss(1.0))

    return Case(make, reference, [rand(5, HIDDEN), labels], rows, p, np.float32(0.7))


def attention_case(slices: int, queries: int, keys: int) -> Case:
    """Bias with a row for each query, and padding with one for all."""
    mask = (np.arange(keys) < np.array([[keys], [2]])).astype(np.int32)

    def reference(q, k, v, bias, mask):
        hidden = torch.where(mask.bool(), 0.0, -torch.inf)[:, None, None]
        scores = q @ k.transpose(2, 3) * 0.5 + bias + hidden
        return torch.softmax(scores, -1) @ v

    inputs = [rand(2, 3, n, 4) for n in (queries, keys, keys)]
    inputs += [rand(1, 3, queries, keys), mask]

    def make(tp: int) -> MaskedAttention:
        return MaskedAttention(Dropout(), AttentionSpec(0.5), slices)

    return Case(make, reference, inputs, [], {}, rand(2, 3, queries, 4))


CASES = {
    "norm": norm_case(),
    "feed forward": feed_forward_case(),
    "embedding": embedding_case(),
    "lm head": lm_head_case(),
    "lm head, smoothed labels": lm_head_case(0.3),
    "attention": attention_case(1, 6, 5),
    "attention in slices": attention_case(3, 6, 5),
    "attention in slices, as many keys": attention_case(2, 6, 6),
    "attention of each query": attention_case(6, 6, 1 + 5),
}


@pytest.mark.parametrize("tensor_parallel", [slow(1), slow(2), 4])
def test_as_torch(tensor_parallel):
    check_cases(CASES, tensor_parallel)
