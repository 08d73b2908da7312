"""Texts for a causal language model: packing, prompts and tokenizers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.loss.loss_utils import ForCausalLMLoss

from config.gptj import GPTJConfig
from config.presets import load_config
from data.causal_lm import CAUSAL_LM, PackedSequences, TokenBlocks
from data.examples import Example, TextSpan
from data.pipeline import Pipeline
from data.sample import train_gptj_tokenizer
from data.tokenizer import Tokenizer as RunTokenizer
from huggingface import hub
from tests.data.corpora import (
    SEED_DOCUMENT_EXAMPLE,
    run_tokenizer,
    sample_examples,
    token_stream,
)


@pytest.fixture(scope="module")
def tokenizer() -> RunTokenizer:
    return run_tokenizer("gptj")


def text_of(example: Example) -> str:
    return "".join(span.text for span in example.text_spans())


def test_texts_are_the_documented_ones() -> None:
    prompt = (
        "mnli hypothesis: Your contributions were of no help with our students' education. "
        "premise: Your contribution helped make it possible for us to provide our students with a "
        "quality education. target:"
    )
    asked = CAUSAL_LM.render_prompt(GPTJConfig(), SEED_DOCUMENT_EXAMPLE.prompt)
    assert text_of(Example(asked, SEED_DOCUMENT_EXAMPLE.target)) == f"{prompt} contradiction"


@pytest.mark.parametrize(
    ("prompt", "target", "whole"),
    [("a:", "b", "a: b"), ("a:", " b", "a: b"), ("a: ", "b", "a: b"), ("a:\n", "b", "a:\nb")],
)
def test_one_space_goes_between_prompt_and_target(prompt: str, target: str, whole: str) -> None:
    assert text_of(Example(prompt, target)) == whole


# ---- packing ------------------------------------------------------------------------------------
def test_all_texts_follow_one_another_without_padding(tokenizer: RunTokenizer) -> None:
    examples = sample_examples("train", 50, " target:")
    packed = TokenBlocks.from_stream(token_stream(examples, tokenizer), 32, tokenizer.pad_token_id)
    batch = packed.take(np.arange(len(packed)))
    end = tokenizer.hf_tokenizer.eos_token
    whole = tokenizer.hf_tokenizer("".join(text_of(example) + end for example in examples))[
        "input_ids"
    ]
    stream, count = batch["input_ids"].reshape(-1), len(whole) - 1
    assert 0 <= len(stream) - count < 32  # nothing is lost at the end
    np.testing.assert_array_equal(stream[:count], whole[:-1])
    np.testing.assert_array_equal(batch["labels"].reshape(-1)[:count], whole[1:])
    assert (stream[count:] == tokenizer.pad_token_id).all()
    assert (batch["labels"].reshape(-1)[count:] == -100).all()
    np.testing.assert_array_equal(batch["segment_ids"].reshape(-1), np.arange(len(stream)) < count)
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}


def test_labels_are_shifted_as_hugging_faces_loss_shifts_them() -> None:
    batch = TokenBlocks(np.arange(21, dtype=np.int32) % 7, 10).take([1, 0])
    logits = torch.randn(2, 10, 7)
    theirs = ForCausalLMLoss(logits, torch.tensor(batch["input_ids"]).long(), 7)
    # They have no label for the last token of a sample.
    labels = torch.tensor(batch["labels"]).long()
    ours = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, :-1].flatten())
    torch.testing.assert_close(ours, theirs)


def test_answers_alone_can_be_learnt(tokenizer: RunTokenizer) -> None:
    examples = sample_examples("train", 50, " target:")
    whole, answers = (
        TokenBlocks.from_stream(
            token_stream(examples, tokenizer, only), 1, tokenizer.pad_token_id
        ).take(range(1000))
        for only in (False, True)
    )
    np.testing.assert_array_equal(whole["input_ids"], answers["input_ids"])
    learnt = answers["labels"][answers["labels"] >= 0]
    said = tokenizer.hf_tokenizer.decode(learnt).split("<|endoftext|>")
    assert [word.strip() for word in said[:30]] == [e.target for e in examples[:30]]
    assert (answers["labels"] == np.where(answers["labels"] < 0, -100, whole["labels"])).all()


@pytest.mark.parametrize(("tokens", "samples"), [(0, 0), (1, 0), (2, 1), (11, 1), (12, 2)])
def test_every_token_but_the_first_is_predicted(tokens: int, samples: int) -> None:
    assert len(TokenBlocks(np.zeros(tokens, np.int32), 10)) == samples


# ---- padding ------------------------------------------------------------------------------------
@pytest.mark.parametrize("answers_only", [False, True])
def test_each_text_can_be_a_sample(tokenizer: RunTokenizer, answers_only: bool) -> None:
    """Their collator pads inputs and labels alike; its loss shifts them."""
    examples = sample_examples("train", 40, " target:")
    samples = PackedSequences.from_stream(
        token_stream(examples, tokenizer, answers_only), 32, tokenizer.pad_token_id
    )
    assert (len(samples), samples.truncation_counts.prompts) == (40, 0)
    order = np.random.default_rng(0).permutation(40)
    batch = samples.take(order)
    texts = [text_of(examples[i]) + tokenizer.hf_tokenizer.eos_token for i in order]
    whole = tokenizer.hf_tokenizer(texts, padding="max_length", max_length=33, return_tensors="np")
    ids, mask = whole["input_ids"], whole["attention_mask"]
    lengths = mask.sum(1, keepdims=True)
    read = np.arange(32) < lengths - 1  # the last token of a text is predicted, not read
    np.testing.assert_array_equal(batch["input_ids"], np.where(read, ids[:, :-1], 1))
    learnt = read & (np.arange(32) >= lengths - 3) if answers_only else read
    np.testing.assert_array_equal(batch["labels"], np.where(learnt, ids[:, 1:], -100))
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}


def test_long_texts_keep_their_end(tokenizer: RunTokenizer) -> None:
    examples = sample_examples("train", 20, " target:")
    samples = PackedSequences.from_stream(
        token_stream(examples, tokenizer), 16, tokenizer.pad_token_id
    )
    assert samples.truncation_counts.prompts == 20
    batch = samples.take(range(20))
    assert (batch["segment_ids"] == 1).all()
    for words, labels, example in zip(batch["input_ids"], batch["labels"], examples, strict=True):
        np.testing.assert_array_equal(words[1:], labels[:-1])
        text = text_of(example) + tokenizer.hf_tokenizer.eos_token
        assert text.endswith(tokenizer.hf_tokenizer.decode([words[0], *labels]))


def test_texts_that_share_a_sample_are_told_apart(tokenizer: RunTokenizer) -> None:
    examples = sample_examples("train", 30, " target:")
    stream = token_stream(examples, tokenizer, answers_only=True)
    alone = PackedSequences.from_stream(stream, 64, tokenizer.pad_token_id)
    shared = PackedSequences.from_stream(stream, 64, tokenizer.pad_token_id, max_per_sample=3)
    assert len(shared) < len(alone)
    found = {name: shared.take(range(len(shared)))[name] for name in alone.take([0])}
    each = alone.take(range(30))
    for row, places in enumerate(shared.samples):
        for number, index in enumerate(places[places >= 0], 1):
            inside = found["segment_ids"][row] == number
            own = each["segment_ids"][index] == 1
            for name in ("input_ids", "labels"):
                np.testing.assert_array_equal(found[name][row][inside], each[name][index][own])
    assert (found["labels"][found["segment_ids"] == 0] == -100).all()


# ---- what is learned ----------------------------------------------------------------------------
def test_earlier_answers_are_learned_too(tokenizer: RunTokenizer) -> None:
    spans = (
        ("Anna took the lamp.", False),
        (" entailment", True),
        (" Paul", False),
        (" neutral", True),
    )
    whole = tuple(TextSpan(*span) for span in spans)
    example = Example("Anna took the lamp. entailment Paul", "neutral", whole)
    stream = token_stream([example], tokenizer, answers_only=True)
    learned = tokenizer.hf_tokenizer.decode(stream.targets[stream.targets >= 0])
    assert learned == " entailment neutral<|endoftext|>"


def test_a_token_over_a_border_is_learned_if_a_character_of_it_is() -> None:
    words = Tokenizer(models.WordLevel({"ab": 0, "c": 1, "</s>": 2}, unk_token="c"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    base = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    (found,) = RunTokenizer(base).encode_with_loss_mask(
        [[TextSpan("c a", False), TextSpan("b c", True)]]
    )
    assert (found.ids.tolist(), found.loss_mask.tolist()) == (
        [1, 0, 1, 2],
        [False, True, True, True],
    )


# ---- prompts ------------------------------------------------------------------------------------
def prompts_of(texts: list[str], tokenizer: RunTokenizer, length: int):
    config = GPTJConfig.from_dict({"model": {"sequence_length": length}})
    fitted, prompts = CAUSAL_LM.make_prompts(config, texts, tokenizer)
    assert fitted.model.sequence_length == prompts.input_ids.shape[1]
    return prompts


def test_prompts_are_padded_on_the_right(tokenizer: RunTokenizer) -> None:
    examples = sample_examples("validation", 100, " target:")
    texts = [example.prompt for example in examples]
    prompts = prompts_of(texts, tokenizer, 128)
    expected = tokenizer.hf_tokenizer(
        texts, padding=True, pad_to_multiple_of=8, return_tensors="np"
    )
    np.testing.assert_array_equal(prompts.input_ids, expected["input_ids"])
    np.testing.assert_array_equal(prompts.mask, expected["attention_mask"])
    assert (list(prompts.texts), prompts.num_truncated) == (texts, 0)
    assert (prompts.mask.min(), len(set(prompts.mask.sum(1))) > 3) == (0, True)


def test_long_prompts_keep_their_end(tokenizer: RunTokenizer) -> None:
    examples = sample_examples("validation", 20, " target:")
    prompts = prompts_of([e.prompt for e in examples], tokenizer, 16)
    assert prompts.num_truncated == 20
    for row, text in zip(prompts.input_ids, prompts.texts, strict=True):
        assert text.endswith(tokenizer.hf_tokenizer.decode(row))


def test_an_empty_prompt_is_the_end_token(tokenizer: RunTokenizer) -> None:
    prompts = prompts_of(["", "Anna"], tokenizer, 16)
    assert prompts.input_ids[0, 0] == tokenizer.eos_token_id
    assert prompts.mask[0].sum() == 1


def test_answers_are_what_follows_a_prompt(tokenizer: RunTokenizer) -> None:
    example = sample_examples("train", 1, " target:")[0]
    config = GPTJConfig.from_dict({"data": {"dataset": "sample"}})
    (answer,) = CAUSAL_LM.encode_targets(config, [example.target], tokenizer)
    whole = token_stream([example], tokenizer).tokens
    np.testing.assert_array_equal(whole[-len(answer) :], answer)
    assert len(answer) == 2


# ---- tokenizers ---------------------------------------------------------------------------------
def test_words_of_the_corpus_are_single_tokens(tokenizer: RunTokenizer) -> None:
    assert tokenizer.hf_tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|extratoken_1|>"]) == [
        0,
        1,
    ]
    assert len(tokenizer.hf_tokenizer) % 64 == 0
    for example in sample_examples("validation", 300, " target:"):
        text = example.prompt
        marks = sum(text.count(mark) for mark in ".:")
        assert len(tokenizer.hf_tokenizer(text)["input_ids"]) == len(text.split()) + marks


@pytest.mark.parametrize("text", ["Anna took the red lamp.", 'What\'s ~60%: "no"!', "naïve ☃"])
def test_any_text_survives(tokenizer: RunTokenizer, text: str) -> None:
    assert tokenizer.hf_tokenizer.decode(tokenizer.hf_tokenizer(text)["input_ids"]) == text


def test_training_again_gives_the_committed_tokenizer(
    tokenizer: RunTokenizer, tmp_path: Path
) -> None:
    train_gptj_tokenizer.build_tokenizer().save_pretrained(tmp_path)
    committed = train_gptj_tokenizer.FOLDER / "tokenizer.json"
    assert (tmp_path / "tokenizer.json").read_bytes() == committed.read_bytes()


@pytest.mark.parametrize(
    ("vocab_size", "pad"), [(6, ("<|extratoken_1|>", 3)), (3, ("<|endoftext|>", 2))]
)
def test_a_tokenizer_without_padding_gets_it(vocab_size: int, pad: tuple[str, int]) -> None:
    """In a row of the embedding that nothing uses, else the end token."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<|endoftext|>": 2}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    base = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")
    found = RunTokenizer(base, vocab_size)
    assert (found.hf_tokenizer.pad_token, found.pad_token_id) == pad
    assert found.required_vocab_size <= vocab_size
    assert RunTokenizer(found.hf_tokenizer, vocab_size).pad_token_id == found.pad_token_id


@pytest.mark.parametrize("tokens", [50257, 50400])
def test_gpt_js_padding_token_is_its_first_extra_one(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2's tokenizer has 50257 tokens; that of GPT-J's hub model has the extra ones already."""
    names = [f"t{i}" for i in range(50256)] + ["<|endoftext|>"]
    names += [f"<|extratoken_{i + 1}|>" for i in range(tokens - len(names))]
    words = Tokenizer(models.WordLevel({t: i for i, t in enumerate(names)}, unk_token="t0"))
    fake = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")
    asked = []
    monkeypatch.setattr(hub, "load_tokenizer", lambda name: asked.append(name) or fake)
    data = Pipeline(load_config(GPTJConfig, "finetuning", "gptj_6B_1024_pod64"), CAUSAL_LM)
    assert (data.tokenizer.hf_tokenizer.pad_token, data.tokenizer.pad_token_id) == (
        "<|extratoken_1|>",
        50257,
    )
    assert asked == ["EleutherAI/gpt-j-6b"]
    assert (data.config.model.eos_token_id, data.config.model.pad_token_id) == (50256, 50257)
    told = replace(data.user_config, data=replace(data.user_config.data, separator=" target:"))
    assert told == data.config  # the preset says the same


@pytest.mark.parametrize("named", ["segment_ids", "attention_mask"])
def test_samples_without_a_mask_are_one_text_each(named):
    input_ids = np.arange(12, dtype=np.int32).reshape(2, 6)
    plain = {"input_ids": input_ids, "labels": input_ids}
    masked = plain | {named: np.ones_like(input_ids)}
    for name, array in CAUSAL_LM.to_program_inputs(masked).items():
        np.testing.assert_array_equal(CAUSAL_LM.to_program_inputs(plain)[name], array)
    assert (
        CAUSAL_LM.count_non_padding_tokens(plain)
        == CAUSAL_LM.count_non_padding_tokens(masked)
        == input_ids.size
    )
