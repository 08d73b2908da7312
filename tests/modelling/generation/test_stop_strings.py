"""Stop texts end what transformers' criterion ends, for tokens of letters and of bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StopStringCriteria

from config.errors import ConfigError
from config.run import Generation
from data.tokenizer import Tokenizer
from modelling.generation import StopStringAutomaton
from tests.data.corpora import run_tokenizer

WIDTH = 12


def bytes_in_tokens() -> Tokenizer:
    """Sentencepiece's way: letters, and bytes for what has none."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(piece, -1.0) for piece in ("▁", "a", "b", "ab", "▁a", "▁ab", "ba▁", "c", "▁abc")]
    pieces += [(f"<0x{byte:02X}>", -2.0) for byte in range(256)]
    backend = Backend(models.Unigram(pieces, 2, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    base = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    return Tokenizer(base)


def ends_at(stops: StopStringAutomaton, rows: np.ndarray) -> np.ndarray:
    """Whether a text ends in each token: bool, as `rows`."""
    states, columns = len(stops.table), stops.columns[rows]
    found, state = np.zeros(rows.shape, bool), np.zeros(len(rows), int)
    for at in range(rows.shape[1]):
        entry = stops.table[state, columns[:, at]]
        found[:, at], state = entry >= states, entry % states
    return found


TOKENIZERS = {
    "t5": lambda: run_tokenizer("t5"),
    "gptj": lambda: run_tokenizer("gptj"),
    "bytes": bytes_in_tokens,
}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("seed", range(4))
def test_texts_end_where_transformers_ends_them(name, seed):
    """Random stop texts, cut from what random tokens print, so that they begin and end within
    tokens, overlap themselves and each other, and hold letters of several bytes."""
    rng, tokenizer = np.random.default_rng(seed), TOKENIZERS[name]()
    count = tokenizer.required_vocab_size
    few = np.concatenate([rng.integers(3, count, 12), tokenizer.hf_tokenizer("é ü\n")["input_ids"]])
    rows = rng.choice(few, (300, WIDTH))
    texts = []
    while len(texts) < 3:
        whole = tokenizer.hf_tokenizer.decode(rows[rng.integers(len(rows)), :6])
        start = rng.integers(0, max(len(whole) - 2, 1))
        text = whole[start : start + rng.integers(1, 5)].strip("\ufffd")
        texts += [text] if text else []
    stops = StopStringAutomaton.from_stop_strings(texts, tokenizer.token_bytes(count + 4))
    ours = ends_at(stops, rows)
    criterion = StopStringCriteria(tokenizer.hf_tokenizer, texts)
    theirs = [criterion(torch.tensor(rows[:, :n]), None).numpy() for n in range(1, WIDTH + 1)]
    np.testing.assert_array_equal(ours, np.stack(theirs, 1))
    assert ours.any()
    assert not ours.all()


def test_most_tokens_share_a_column():
    stops = StopStringAutomaton.from_stop_strings(
        ["\n", "Answer:"], run_tokenizer("gptj").token_bytes(600)
    )
    assert stops.table.shape[1] < 40
    assert len(stops.columns) == 601


def test_texts_are_separated_by_commas():
    given = Generation(stop_strings=r"\n,a\,b,\\,c d")
    assert given.parse_stop_strings() == ("\n", "a,b", "\\", "c d")
    assert Generation().parse_stop_strings() == ()
    for empty in ("", "a,,b", "a,"):
        with pytest.raises(ConfigError, match="a text is empty"):
            Generation(stop_strings=empty)
