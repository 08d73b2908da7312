"""Greedy generation of GPT-J against Hugging Face's, and cached decoding against their logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch

import popxl
from config.gptj import GPTJConfig
from inference import Inference
from modelling.gptj.generation import GPTJGenerator
from modelling.gptj.weights import weight_table
from modelling.layers import Groups
from popxl import Tensor, ops
from popxl_addons import NamedTensors
from popxl_addons.patterns import apply_pre_alias_patterns
from tests.modelling.gptj.hf import END, PAD, VOCABULARY, hf_model, logical, small_config

PROMPTS, POSITIONS = 64, 5


def config_of(dp: int, tp: int, micro_batch: int, slices: int = 1) -> GPTJConfig:
    """A tiny GPT-J that generates."""
    return small_config(dp, tp, micro_batch, slices, eval=True, output_length=POSITIONS)


@dataclass(frozen=True)
class Reference:
    """Hugging Face's weights, prompts, and what it generates from each alone."""

    weights: dict[str, np.ndarray]
    words: np.ndarray
    mask: np.ndarray
    tokens: np.ndarray = field(repr=False)


@cache
def reference() -> Reference:
    """64 prompts of all lengths, padded on the right. Theirs are not padded at all."""
    model = config_of(1, 1, 1).model
    hf = hf_model(small_config())
    with torch.no_grad():
        hf.lm_head.bias[END] += 0.6  # now and then a sequence ends
    rng = np.random.default_rng(3)
    length = model.sequence_length
    lengths = rng.integers(1, length, PROMPTS, endpoint=True)
    lengths[:2] = 1, length
    mask = (np.arange(length) < lengths[:, None]).astype(np.int32)
    words = np.where(mask, rng.integers(3, VOCABULARY, mask.shape), PAD).astype(np.int32)
    tokens = np.full((PROMPTS, POSITIONS), PAD)
    for row, prompt, n in zip(tokens, words, lengths, strict=True):
        ids = torch.tensor(prompt[None, :n]).long()
        found = hf.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=POSITIONS,
            pad_token_id=PAD,
        )[0, n:]
        row[: len(found)] = found.numpy()
    return Reference(logical(hf), words, mask, tokens)


def test_the_reference_is_worth_comparing_with():
    tokens = reference().tokens
    ended = (tokens[:, :-1] == END).any(1)
    assert 5 < ended.sum() < PROMPTS - 5  # sequences of different lengths
    assert len(np.unique(tokens)) > 20
    assert len(np.unique(tokens, axis=0)) > 40


@pytest.mark.parametrize(
    ("dp", "tp", "micro_batch", "slices"),
    [(1, 1, 64, 1), (1, 2, 48, 2), (2, 2, 16, 1), (1, 4, 32, 1)],
)
def test_greedy_tokens_are_hugging_faces(dp, tp, micro_batch, slices):
    """The second layout's second run is not full: 64 prompts, 48 a run."""
    expected = reference()
    with Inference(config_of(dp, tp, micro_batch, slices)) as model:
        model.write(expected.weights)
        tokens = model.generate(expected.words, expected.mask)
    np.testing.assert_array_equal(tokens, expected.tokens)


class Forced:
    """Follows given tokens instead of choosing, and keeps the logits."""

    def __init__(self, batch: int, part: int) -> None:
        self.logits = popxl.d2h_stream((batch, part), popxl.float32, "cached")
        self.tokens = popxl.h2d_stream((batch,), popxl.int32, "tokens")

    def __call__(self, logits: Tensor) -> Tensor:
        ops.host_store(self.logits, logits)
        return ops.host_load(self.tokens)


@pytest.mark.parametrize("tp", [1, 2])
def test_cached_logits_are_hugging_faces(tp):
    batch, config = 8, config_of(1, tp, 8)
    part = VOCABULARY // tp
    forced = np.random.default_rng(0).integers(3, VOCABULARY, (batch, POSITIONS), np.int32)
    expected = reference()
    ir = popxl.Ir(replication=tp)
    ir.num_host_transfers = POSITIONS
    with ir.main_graph:
        generator = GPTJGenerator(config, Groups.current(tp))
        weights = generator.facts.init(empty=True)
        words, mask = (popxl.variable(x[:batch]) for x in (expected.words, expected.mask))
        choose = Forced(batch, part)
        generator.generate(weights, words, mask, choose)
    apply_pre_alias_patterns(ir)
    table = weight_table(config)
    trees = {name: NamedTensors(fwd=weights.get(name)) for name in table.layers}
    with popxl.Session(ir, "cpu") as session:
        session.write_variables_data(table.to_variables(expected.weights, trees))
        out = session.run({choose.tokens: np.repeat(forced.T[:, None], tp, 1)})
    cached = out[choose.logits].reshape(POSITIONS, tp, batch, part)
    ours = cached.transpose(2, 0, 1, 3).reshape(batch, POSITIONS, VOCABULARY)
    hf = hf_model(small_config())
    hf.load_state_dict({n: torch.tensor(x) for n, x in expected.weights.items()})
    for i, n in enumerate(expected.mask[:batch].sum(1)):
        whole = np.concatenate([expected.words[i, :n], forced[i, :-1]])
        with torch.no_grad():
            theirs = hf(input_ids=torch.tensor(whole[None]).long()).logits[0, n - 1 :].numpy()
        np.testing.assert_allclose(ours[i], theirs, atol=1e-4)
