"""Texts for a causal language model: packing, prompts and tokenizers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.loss.loss_utils import ForCausalLMLoss

from config.gptj import GPTJConfig
from config.presets import load_config
from data.sample import train_gptj_tokenizer
from data.streams import (
    PackedTokens,
    answer_ids,
    pack,
    pad,
    prompts_of,
    training_text,
    with_extra_tokens,
)
from huggingface import hub
from modelling.spec import family_of
from modelling.text import load_tokenizer
from tests.data.corpora import SEED_DOCUMENT_EXAMPLE, sample_examples, sample_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return sample_tokenizer("gptj")


def test_texts_are_the_documented_ones() -> None:
    prompt = (
        "mnli hypothesis: Your contributions were of no help with our students' education. "
        "premise: Your contribution helped make it possible for us to provide our students with a "
        "quality education. target:"
    )
    asked = SEED_DOCUMENT_EXAMPLE._replace(prompt=SEED_DOCUMENT_EXAMPLE.prompt + " target:")
    text = training_text(asked, "<|endoftext|>")
    assert text == f"{prompt} contradiction <|endoftext|>"


# ---- packing ------------------------------------------------------------------------------------
def test_all_texts_follow_one_another_without_padding(tokenizer: PreTrainedTokenizerFast) -> None:
    examples = sample_examples("train", 50, " target:")
    packed = pack(examples, tokenizer, 32)
    batch = packed.take(np.arange(len(packed)))
    end = tokenizer.eos_token
    whole = tokenizer("".join(training_text(example, end) for example in examples))["input_ids"]
    stream = batch["input_ids"].reshape(-1)
    assert len(stream) == (len(whole) - 1) // 32 * 32
    np.testing.assert_array_equal(stream, whole[: len(stream)])
    np.testing.assert_array_equal(batch["labels"].reshape(-1), whole[1 : len(stream) + 1])
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}


def test_labels_are_shifted_as_hugging_faces_loss_shifts_them() -> None:
    batch = PackedTokens(np.arange(21, dtype=np.int32) % 7, 10).take([1, 0])
    logits = torch.randn(2, 10, 7)
    theirs = ForCausalLMLoss(logits, torch.tensor(batch["input_ids"]).long(), 7)
    # They have no label for the last token of a sample.
    labels = torch.tensor(batch["labels"]).long()
    ours = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, :-1].flatten())
    torch.testing.assert_close(ours, theirs)


def test_answers_alone_can_be_learnt(tokenizer: PreTrainedTokenizerFast) -> None:
    examples = sample_examples("train", 50, " target:")
    whole, answers = (
        pack(examples, tokenizer, 1, only).take(range(1000)) for only in (False, True)
    )
    np.testing.assert_array_equal(whole["input_ids"], answers["input_ids"])
    learnt = answers["labels"][answers["labels"] >= 0]
    said = tokenizer.decode(learnt).split(" <|endoftext|>")
    assert [word.strip() for word in said[:30]] == [e.target for e in examples[:30]]
    assert (answers["labels"] == np.where(answers["labels"] < 0, -100, whole["labels"])).all()


@pytest.mark.parametrize(("tokens", "samples"), [(0, 0), (1, 0), (10, 0), (11, 1), (21, 2)])
def test_what_fills_no_sample_is_left_out(tokens: int, samples: int) -> None:
    assert len(PackedTokens(np.zeros(tokens, np.int32), 10)) == samples


def test_too_little_text_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    examples = sample_examples("train", 2, " target:")
    with pytest.raises(ValueError, match=r"the 2 examples have \d+ tokens, but .* 128 \+ 1"):
        pack(examples, tokenizer, 128)


# ---- padding ------------------------------------------------------------------------------------
@pytest.mark.parametrize("answers_only", [False, True])
def test_each_text_can_be_a_sample(tokenizer: PreTrainedTokenizerFast, answers_only: bool) -> None:
    """Their collator pads inputs and labels alike; its loss shifts them."""
    examples = sample_examples("train", 40, " target:")
    samples = pad(examples, tokenizer, 32, answers_only)
    assert (len(samples), samples.cuts.prompts) == (40, 0)
    order = np.random.default_rng(0).permutation(40)
    batch = samples.take(order)
    texts = [training_text(examples[i], tokenizer.eos_token) for i in order]
    whole = tokenizer(texts, padding="max_length", max_length=33, return_tensors="np")
    ids, mask = whole["input_ids"], whole["attention_mask"]
    lengths = mask.sum(1, keepdims=True)
    read = np.arange(32) < lengths - 1  # the last token of a text is predicted, not read
    np.testing.assert_array_equal(batch["input_ids"], np.where(read, ids[:, :-1], 1))
    learnt = read & (np.arange(32) >= lengths - 4) if answers_only else read
    np.testing.assert_array_equal(batch["labels"], np.where(learnt, ids[:, 1:], -100))
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}


def test_long_texts_keep_their_end(tokenizer: PreTrainedTokenizerFast) -> None:
    examples = sample_examples("train", 20, " target:")
    samples = pad(examples, tokenizer, 16)
    assert samples.cuts.prompts == 20
    batch = samples.take(range(20))
    for words, labels, example in zip(*batch.values(), examples, strict=True):
        np.testing.assert_array_equal(words[1:], labels[:-1])
        text = training_text(example, tokenizer.eos_token)
        assert text.endswith(tokenizer.decode([words[0], *labels]))


# ---- prompts ------------------------------------------------------------------------------------
def test_prompts_are_padded_on_the_right(tokenizer: PreTrainedTokenizerFast) -> None:
    examples = sample_examples("validation", 100, " target:")
    texts = [example.prompt for example in examples]
    prompts = prompts_of(texts, tokenizer, 128, 8)
    expected = tokenizer(texts, padding=True, pad_to_multiple_of=8, return_tensors="np")
    np.testing.assert_array_equal(prompts.words, expected["input_ids"])
    np.testing.assert_array_equal(prompts.mask, expected["attention_mask"])
    assert (list(prompts.texts), prompts.truncated) == (texts, 0)
    assert (prompts.mask.min(), len(set(prompts.mask.sum(1))) > 3) == (0, True)


def test_long_prompts_keep_their_end(tokenizer: PreTrainedTokenizerFast) -> None:
    examples = sample_examples("validation", 20, " target:")
    prompts = prompts_of([e.prompt for e in examples], tokenizer, 16, 8)
    assert prompts.truncated == 20
    for words, text in zip(prompts.words, prompts.texts, strict=True):
        assert text.endswith(tokenizer.decode(words))


def test_an_empty_prompt_is_the_end_token(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = prompts_of(["", "Anna"], tokenizer, 16, 1)
    assert prompts.words[0, 0] == tokenizer.eos_token_id
    assert prompts.mask[0].sum() == 1


def test_answers_are_what_follows_a_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    example = sample_examples("train", 1, " target:")[0]
    (answer,) = answer_ids([example.target], tokenizer)
    whole = tokenizer(training_text(example, tokenizer.eos_token))["input_ids"]
    np.testing.assert_array_equal(whole[-len(answer) :], answer)
    assert len(answer) == 3


# ---- tokenizers ---------------------------------------------------------------------------------
def test_words_of_the_corpus_are_single_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|extratoken_1|>"]) == [0, 1]
    assert len(tokenizer) % 64 == 0
    for example in sample_examples("validation", 300, " target:"):
        text = example.prompt
        marks = sum(text.count(mark) for mark in ".:")
        assert len(tokenizer(text)["input_ids"]) == len(text.split()) + marks


@pytest.mark.parametrize("text", ["Anna took the red lamp.", 'What\'s ~60%: "no"!', "naïve ☃"])
def test_any_text_survives(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_training_again_gives_the_committed_tokenizer(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    train_gptj_tokenizer.write(tmp_path)
    committed = train_gptj_tokenizer.FOLDER / "tokenizer.json"
    assert (tmp_path / "tokenizer.json").read_bytes() == committed.read_bytes()


def test_extra_tokens_fill_the_vocabulary() -> None:
    """As a GPT-2 tokenizer is filled up to GPT-J's embedding."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<|endoftext|>": 2}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")
    filled = with_extra_tokens(tokenizer, 6)
    assert len(filled) == 6
    extra = [f"<|extratoken_{i}|>" for i in (1, 2, 3)]
    assert filled.convert_tokens_to_ids(extra) == [3, 4, 5]
    assert filled.pad_token_id == 3
    again = with_extra_tokens(filled, 6)
    assert (len(again), again.pad_token_id) == (6, 3)


@pytest.mark.parametrize("tokens", [50257, 50400])
def test_every_row_of_gpt_js_embedding_has_a_token(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2's tokenizer has 50257 tokens; that of GPT-J's hub model has the extra ones already."""
    names = [f"t{i}" for i in range(50256)] + ["<|endoftext|>"]
    names += [f"<|extratoken_{i + 1}|>" for i in range(tokens - len(names))]
    words = Tokenizer(models.WordLevel({t: i for i, t in enumerate(names)}, unk_token="t0"))
    fake = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")
    asked = []
    monkeypatch.setattr(hub, "load_tokenizer", lambda name: asked.append(name) or fake)
    config = load_config(GPTJConfig, "finetuning", "gptj_6B_1024_pod64")
    filled = load_tokenizer(config, family_of(config))
    assert asked == ["EleutherAI/gpt-j-6b"]
    assert len(filled) == config.model.embedding.vocab_size == 50400
    assert (filled.pad_token, filled.pad_token_id) == ("<|extratoken_1|>", 50257)
    assert filled.convert_ids_to_tokens(50399) == "<|extratoken_143|>"
    model = config.model
    assert (model.end_token, model.pad_token) == (filled.eos_token_id, filled.pad_token_id)
