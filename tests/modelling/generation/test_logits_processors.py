"""Penalties, forbidden n-grams and stop texts, against transformers' `generate`."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from config.sections import RunConfig
from data.tokenizer import Tokenizer
from modelling.generation import (
    BeamSearchStrategy,
    DecodingStrategy,
    GreedyStrategy,
    LogitsProcessors,
    SamplingStrategy,
    StopStringAutomaton,
)
from sessions.generation import GenerationSession
from tests.modelling.generation import gptj, t5
from tests.modelling.torch_training import logical
from tests.slow import slow

POSITIONS, TEXTS = 10, ("ca", "bbc", "d")
PENALTY, SIZE = 1.6, 2


@cache
def tokenizer(vocabulary: int, end: int, pad: int) -> Tokenizer:
    """Tokens of one to four letters, so that stop texts begin and end within them."""
    rng, pieces = np.random.default_rng(8), {}
    letters = list("abcdef")
    for number in range(vocabulary):
        piece = {end: "<end>", pad: "<pad>"}.get(number) or (letters and letters.pop()) or ""
        while not piece or piece in pieces:
            piece = "".join(rng.choice(list("abcefgh"), rng.integers(2, 5)))
        pieces[piece] = number
    backend = Backend(models.BPE(pieces, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    base = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")
    return Tokenizer(base)


@dataclass(frozen=True)
class Case:
    """Hugging Face's model that never writes padding, its weights, and prompts."""

    hf: Any
    weights: dict[str, np.ndarray]
    input_ids: np.ndarray
    mask: np.ndarray
    tokenizer: Tokenizer


@cache
def case_of(family: ModuleType) -> Case:
    expected, hf = family.reference(), deepcopy(family.reference_model())
    config = family.config_of(1, 1, 8)
    if family is t5:
        weights = {name: p.detach().numpy() for name, p in hf.named_parameters()}
    else:
        with torch.no_grad():
            hf.lm_head.bias[family.PAD] = -1e4  # padding before a prompt counts as read there
        weights = logical(hf)
    own = tokenizer(config.model.embedding.vocab_size, family.END, family.PAD)
    return Case(hf, weights, expected.input_ids, expected.mask, own)


@cache
def theirs(family: ModuleType, beams: int, ruled: bool = True) -> np.ndarray:
    """What transformers writes for one batch, padded on the left."""
    case = case_of(family)
    shift = [np.roll(a, n, 0) for a, n in _by_padding(case.input_ids, case.mask)]
    mask = [np.roll(a, n, 0) for a, n in _by_padding(case.mask, case.mask)]
    processors: dict[str, Any] = {
        "repetition_penalty": PENALTY,
        "no_repeat_ngram_size": SIZE,
        "stop_strings": list(TEXTS),
        "tokenizer": case.tokenizer.hf_tokenizer,
    }
    found = case.hf.generate(
        input_ids=torch.tensor(np.stack(shift)).long(),
        attention_mask=torch.tensor(np.stack(mask)),
        do_sample=False,
        num_beams=beams,
        max_new_tokens=POSITIONS,
        pad_token_id=family.PAD,
        eos_token_id=family.END,
        **(processors if ruled else {}),
    )
    new = found[:, 1 if case.hf.config.is_encoder_decoder else case.input_ids.shape[1] :].numpy()
    tokens = np.full((len(new), POSITIONS), family.PAD)
    tokens[:, : new.shape[1]] = new
    return tokens


def _by_padding(rows: np.ndarray, mask: np.ndarray) -> list[tuple[np.ndarray, int]]:
    return list(zip(rows, mask.shape[1] - mask.sum(1), strict=True))


def config_of(family: ModuleType, dp: int, tp: int) -> RunConfig:
    if family is t5:
        return t5.config_of(dp, tp, 12, decoder_sequence_length=POSITIONS)
    config = gptj.config_of(dp, tp, 12)
    return replace(config, model=replace(config.model, output_length=POSITIONS))


def ours(
    family: ModuleType, strategy: DecodingStrategy, weights: str, dp: int = 1, tp: int = 1
) -> np.ndarray:
    case, config = case_of(family), config_of(family, dp, tp)
    generation = replace(config.generation, weights=weights, micro_batches=3)
    stops = StopStringAutomaton.from_stop_strings(
        TEXTS, case.tokenizer.token_bytes(config.model.embedding.vocab_size)
    )
    strategy = replace(strategy, logits_processors=LogitsProcessors(PENALTY, SIZE, stops))
    config = replace(config, generation=generation)
    with GenerationSession(config, strategy) as model:
        model.write(case.weights)
        return model.generate(case.input_ids, case.mask)


@pytest.mark.parametrize("family", [t5, gptj])
def test_the_reference_is_worth_comparing_with(family):
    """Sequences end by the end token and by texts, and every rule changes some of them."""
    case, found = case_of(family), theirs(family, 1)
    assert (found != theirs(family, 1, False)).any(1).mean() > 0.5
    ended = (found == family.END).any(1)
    stopped = ~ended & (found[:, -1] == family.PAD)
    assert ended.sum() > 3
    assert 10 < stopped.sum() < 60
    written = case.tokenizer.hf_tokenizer.batch_decode(found[stopped], skip_special_tokens=True)
    whole = np.mean([any(text in row for text in TEXTS) for row in written])
    assert 0.5 < whole <= 1
    assert (whole < 1) == (family is gptj), "only there, texts begin in the prompt"
    assert not all(any(row.endswith(text) for text in TEXTS) for row in written)


@pytest.mark.parametrize(
    ("family", "strategy", "weights", "dp", "tp"),
    [
        (gptj, GreedyStrategy(), "streamed", 1, 1),
        slow(gptj, BeamSearchStrategy(3), "resident", 1, 2),
        (t5, BeamSearchStrategy(4), "streamed", 1, 1),
        slow(t5, SamplingStrategy(3, top_k=1), "resident", 2, 2),
        slow(gptj, SamplingStrategy(3, top_k=1), "resident", 1, 2),
        slow(gptj, BeamSearchStrategy(3), "streamed", 2, 2),
        slow(t5, BeamSearchStrategy(4), "resident", 1, 4),
        slow(t5, GreedyStrategy(), "streamed", 1, 2),
    ],
)
def test_rules_choose_what_transformers_chooses(family, strategy, weights, dp, tp):
    """Sampling from the likeliest token alone is greedy search."""
    tokens = ours(family, strategy, weights, dp, tp)
    expected = theirs(family, strategy.sequences_per_prompt)
    if (
        family is t5 and strategy.sequences_per_prompt > 1
    ):  # their beams fill with END where PAD is 0
        tokens, expected = (np.where(t == family.PAD, family.END, t) for t in (tokens, expected))
    np.testing.assert_array_equal(tokens, expected)
