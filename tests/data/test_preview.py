"""Samples as people see them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from config.llama import LlamaConfig
from config.presets import load_config
from data.causal_lm import CAUSAL_LM, PackedSequences, TokenBlocks
from data.examples import Example, TextSpan
from data.loader import Loader
from data.pipeline import Pipeline
from data.preview import format_samples, format_sequence
from data.seq2seq import SEQ2SEQ, PackedExamples
from data.task import SAMPLE_FOLDER
from tests.data.corpora import encode, run_tokenizer, token_stream
from tests.pages import ROOT, blocks

WHOLE = (TextSpan("Anna:\n", False), TextSpan("the lamp", True), TextSpan(" ☃", False))


def lines_of(samples, shape, tokenizer, indices=(0,), colored=False):
    return "\n".join(format_samples(samples, indices, shape, tokenizer, colored)).splitlines()


def test_learned_tokens_of_a_text_are_marked():
    tokenizer = run_tokenizer("gptj")
    samples = PackedSequences.from_stream(
        token_stream([Example("", "", WHOLE)], tokenizer, True), 32, 1
    )
    said = lines_of(samples, CAUSAL_LM, tokenizer)
    assert said[0] == "the first samples: · separates tokens, loss tokens are in ⟪ ⟫"
    assert re.fullmatch(r"sample 1: 1 text, \d+ tokens, (\d) in the loss", said[1])
    text = "".join(said[2:])
    learned = "".join(re.findall("⟪(.*?)⟫", text)).replace("·", "")
    assert learned == "the lamp"
    assert r"\n" in text
    assert "�" not in text


def test_terminals_get_colours():
    tokenizer = run_tokenizer("gptj")
    (text,) = [[(token, True) for token in ids] for ids in tokenizer.encode(["the lamp"])]
    assert format_sequence(text, tokenizer, colored=True).count("\033[32m") >= 1
    assert "⟪" not in format_sequence(text, tokenizer, colored=True)


@pytest.mark.parametrize("places", [1, 3])
def test_pairs_show_prompt_and_target(places):
    tokenizer = run_tokenizer()
    examples = [Example("Anna took the lamp", "lamp"), Example("Paul took it", "it")]
    samples = encode(examples, tokenizer, 32, 4)
    if places > 1:
        samples = PackedExamples.from_examples(samples, places)
    batch = samples.take(np.arange(len(samples)))
    found = []
    for text in SEQ2SEQ.sequences_with_loss_mask(batch):
        parts = [[token for token, learned in text if learned == mark] for mark in (False, True)]
        found.append(Example(*tokenizer.decode(parts)))
    assert sorted(found) == sorted(examples)


def test_every_token_that_follows_is_shown_once():
    """Joined texts learn everything, the first token of a sample and the last label included."""
    tokenizer = run_tokenizer("gptj")
    samples = TokenBlocks.from_stream(
        token_stream([Example("Anna took", "the lamp")] * 9, tokenizer), 16, tokenizer.pad_token_id
    )
    (text,) = CAUSAL_LM.sequences_with_loss_mask(samples.take([0]))
    assert [token for token, _ in text] == samples.tokens[:17].tolist()
    assert [learned for _, learned in text] == [False] + [True] * 16


def test_the_tutorial_shows_what_its_command_prints():
    given = {
        "data": {
            "train": str(SAMPLE_FOLDER / "conversations" / "train.jsonl"),
            "tokenizer": str(SAMPLE_FOLDER / "chat_tokenizer"),
            "examples_per_sample": 4,
        },
        "model": {"vocab_size": 640, "sequence_length": 128},
        "training": {"global_batch_size": 16},
        "execution": {"micro_batch_size": 16},
    }
    data = Pipeline(load_config(LlamaConfig, "finetuning", "qwen3_tiny", given), CAUSAL_LM)
    samples = data.make_training_samples()
    first = Loader.from_config(data.config, samples).peek_indices(1).tolist()
    said = "\n".join(format_samples(samples, first, CAUSAL_LM, data.tokenizer, colored=False))
    shown = [
        text.removesuffix("  …\n")
        for text in blocks(ROOT / "docs" / "own_task.md", "text")
        if text.startswith("the first samples")
    ]
    assert len(shown) == 1
    assert said.startswith(shown[0])
    assert shown[0].count("assistant") == 3
