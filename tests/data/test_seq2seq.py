"""Corpora, prompts, tokenizers, token arrays and answers; the reference is Hugging Face's T5."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from config.bart import BartConfig
from config.sections import Data
from data.examples import Example
from data.samples import IGNORE_INDEX
from data.seq2seq import SEQ2SEQ, make_random_examples, shift_right
from data.task import NLI_LABELS, TASKS, task_from_config
from data.tokenizer import Tokenizer
from huggingface import hub
from huggingface.hub import DataUnavailable
from tests.children import PYTHON_PATH
from tests.data.corpora import (
    SEED_DOCUMENT_EXAMPLE,
    encode,
    sample_examples,
    sample_tokenizer,
)
from tests.slow import slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return sample_tokenizer()


def test_prompt_is_the_documented_one() -> None:
    assert SEED_DOCUMENT_EXAMPLE.prompt == (
        "mnli hypothesis: Your contributions were of no help with our students' education. "
        "premise: Your contribution helped make it possible for us to provide our students with "
        "a quality education."
    )


# ---- tokenizer ----------------------------------------------------------------------------------
def test_special_tokens_are_where_t5_has_them(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_tokens_to_ids(["<pad>", "</s>", "<unk>"]) == [0, 1, 2]
    last = len(tokenizer) - 1
    assert tokenizer.convert_tokens_to_ids(["<extra_id_0>", "<extra_id_1>"]) == [last, last - 1]
    assert len(tokenizer) % 64 == 0
    assert len(tokenizer) <= 1024
    assert max(tokenizer.get_vocab().values()) == last


@pytest.mark.parametrize(
    "text", ["Anna took the red lamp.", 'What\'s 3 * (4 + 5)? ~60%: "no"!', *NLI_LABELS]
)
def test_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_words_of_the_corpus_are_single_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    for example in sample_examples("validation", 300):
        prompt = example.prompt
        marks = sum(prompt.count(mark) for mark in ".:")
        assert len(tokenizer(prompt)["input_ids"]) == len(prompt.split()) + marks + 1


# ---- encoding -----------------------------------------------------------------------------------
@pytest.mark.parametrize("sequence_length", [40, 22], ids=["all fit", "some are cut"])
def test_prompts_are_padded_and_cut_as_hugging_face_does(
    tokenizer: PreTrainedTokenizerFast, sequence_length: int
) -> None:
    examples = sample_examples("validation", 200)
    prompts = [example.prompt for example in examples]
    expected = tokenizer(
        prompts,
        padding="max_length",
        truncation=True,
        max_length=sequence_length,
        return_tensors="np",
    )
    encoded = encode(examples, Tokenizer(tokenizer), sequence_length, 4)
    batch = encoded.take(np.arange(200))
    for name, theirs in {"input_ids": "input_ids", "segment_ids": "attention_mask"}.items():
        assert batch[name].dtype == np.int32
        np.testing.assert_array_equal(batch[name], expected[theirs])
    longer = sum(len(ids) > sequence_length for ids in tokenizer(prompts)["input_ids"])
    assert encoded.truncation_counts.prompts == longer
    assert (longer > 0) == (sequence_length == 22)


def test_batches_have_the_chosen_examples_in_order(tokenizer: PreTrainedTokenizerFast) -> None:
    examples = sample_examples("validation", 20)
    encoded = encode(examples, Tokenizer(tokenizer), 32, 4)
    batch = encoded.take([7, 0, 7])
    assert len(encoded) == 20
    for row, index in enumerate([7, 0, 7]):
        text = tokenizer.decode(batch["input_ids"][row], skip_special_tokens=True)
        assert text == examples[index].prompt
        target = batch["labels"][row][batch["labels"][row] != IGNORE_INDEX]
        assert tokenizer.decode(target) == examples[index].target + "</s>"


def test_decoder_reads_what_hugging_face_s_model_would_give_it(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    examples = sample_examples("validation", 50)
    batch = encode(examples, Tokenizer(tokenizer), 32, 4).take(np.arange(50))
    config = T5Config(
        vocab_size=256, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    expected = model._shift_right(torch.tensor(batch["labels"], dtype=torch.long))
    np.testing.assert_array_equal(batch["decoder_input_ids"], expected.numpy())
    assert (batch["decoder_input_ids"][:, 0] == 0).all()


def test_answers_that_do_not_fit_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="is 1: give --decoder_sequence_length 2 or more"):
        encode([SEED_DOCUMENT_EXAMPLE], Tokenizer(tokenizer), 32, 1)


def test_no_examples_make_no_rows(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = encode([], Tokenizer(tokenizer), 32, 4)
    assert len(encoded) == 0
    assert encoded.take([])["input_ids"].shape == (0, 32)


# ---- corpora ------------------------------------------------------------------------------------
def test_mnli_is_asked_for_its_mismatched_validation_split_and_loses_unlabelled_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[object, ...]] = []

    def load_dataset(path: str, name: str, split: str) -> datasets.Dataset:
        asked.append((path, name, split))
        rows = {"premise": ["a", "b", "c"], "hypothesis": ["d", "e", "f"], "idx": [0, 1, 2]}
        return datasets.Dataset.from_dict(rows | {"label": [2, -1, 0]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = task_from_config(Data(dataset="mnli")).read_corpus("validation")
    assert asked == [("glue", "mnli", "validation_mismatched")]
    assert corpus.examples == [
        Example("mnli hypothesis: d premise: a", "contradiction"),
        Example("mnli hypothesis: f premise: c", "entailment"),
    ]
    assert corpus.unlabeled == 1


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailable, match=f"folder {tmp_path} holds no tokenizer"):
        hub.load_tokenizer(str(tmp_path))


# ---- no network ---------------------------------------------------------------------------------
ASK_FOR_BOTH = """
import time
naps = []
time.sleep = naps.append
import datasets, transformers
transformers.AutoTokenizer  # imported on first use
from huggingface.hub import DataUnavailable
from huggingface.hub import load_tokenizer
from data.task import TASKS
for ask in (
    lambda: TASKS["mnli"].read_corpus("train"),
    lambda: load_tokenizer("google/flan-t5-small"),
):
    try:
        ask()
    except DataUnavailable as error:
        print(error)
print(sum(naps))
"""
# Nothing listens on port 1, so connections are refused as on a machine without a network.
NO_NETWORK = {
    "forbidden": {"HF_HUB_OFFLINE": "1"},
    "unreachable": {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:1"},
}
SAID = {
    "forbidden": ("HF_HUB_OFFLINE is set", " and unset HF_HUB_OFFLINE"),
    "unreachable": ("http://127.0.0.1:1 is not reachable", ""),
}


@pytest.mark.parametrize("how", [slow("forbidden"), "unreachable"])
def test_without_a_network_and_cache_one_sentence_says_what_to_do(how: str, tmp_path: Path) -> None:
    """In a process of its own: the hub's libraries read their settings when they are imported."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env = inherited | NO_NETWORK[how] | {"HF_HOME": str(tmp_path), "PYTHONPATH": PYTHON_PATH}
    done = subprocess.run(
        [sys.executable, "-c", ASK_FOR_BOTH],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    *sentences, slept = done.stdout.splitlines()
    cache = f"and the cache {tmp_path}/hub does not have all of it): connect to the network"
    why, then = SAID[how]
    assert sentences == [
        f"cannot get data set glue/mnli from the Hugging Face hub ({why}, {cache}{then}, "
        "or use --data.dataset sample, or files of your own with "
        "--data.train and --data.validation",
        "tokenizer google/flan-t5-small is no folder, and cannot be had from the Hugging Face hub "
        f"({why}, {cache}{then}, or give a folder with --tokenizer",
    ]
    assert float(slept) < 1  # seconds; between their retries the libraries sleep more than 50


def test_errors_of_a_reachable_hub_are_quoted_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise FileNotFoundError("it moved\nlong story")

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(hub, "is_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataUnavailable, match=r"hub \(it moved\): check the name") as error:
        TASKS["mnli"].read_corpus("train")
    assert "\n" not in str(error.value)


# ---- generated ----------------------------------------------------------------------------------
def test_generated_batches_look_like_real_ones() -> None:
    examples = make_random_examples(64, 100, sequence_length=20, decoder_sequence_length=6, seed=3)
    batch = examples.take(np.arange(64))
    lengths = batch["segment_ids"].sum(axis=1)
    assert lengths.min() >= 10
    assert lengths.max() == 20
    assert len(set(lengths)) > 5
    for ids, length in zip(batch["input_ids"], lengths, strict=True):
        assert ids[length - 1] == 1
        assert ((ids[: length - 1] >= 3) & (ids[: length - 1] < 100)).all()
        assert (ids[length:] == 0).all()
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
    ignored = batch["labels"] == IGNORE_INDEX
    assert (np.diff(ignored.astype(int), axis=1) >= 0).all(), "padding is on the right"
    targets = (~ignored).sum(axis=1)
    assert (targets.min(), targets.max()) == (2, 6)
    assert (batch["labels"][np.arange(64), targets - 1] == 1).all()
    np.testing.assert_array_equal(batch["decoder_input_ids"], shift_right(batch["labels"], 0))


def test_generated_samples_have_the_models_tokens() -> None:
    """Its end and padding, and of Marian's two vocabularies each side's."""
    fields = {"model_type": "marian", "vocab_size": 9, "decoder_vocab_size": 7, "pad_token_id": 6}
    model = {**fields, "eos_token_id": 5, "bos_token_id": None, "forced_eos_token_id": None}
    lengths = {"sequence_length": 12, "decoder_sequence_length": 8, "decoder_start_token_id": 6}
    config = BartConfig.from_dict({"model": model | lengths})
    batch = SEQ2SEQ.make_random_samples(config, 200, None).take(np.arange(200))
    read, ids, labels = batch["segment_ids"] > 0, batch["input_ids"], batch["labels"]
    assert (ids == 6)[~read].all()
    assert set(ids[read]) == {3, 4, 5, 7, 8}
    assert set(labels.ravel()) == {3, 4, 5, IGNORE_INDEX}
    assert ((ids == 5).sum(1) == 1).all()
    assert ((labels == 5).sum(1) == 1).all()


def test_generated_samples_depend_on_the_seed() -> None:
    first, again, other = (make_random_examples(9, 50, 12, 5, seed).tokens for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert len(first) != len(other) or (first != other).any()
