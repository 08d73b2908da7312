"""Mixtures: shares of samples, settings of their own, an order that follows from the seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from config.errors import UserError
from config.gptj import GPTJConfig
from data.causal_lm import CAUSAL_LM, TokenBlocks
from data.length_stats import measure_lengths
from data.loader import Loader
from data.mixture import MixtureSamples
from data.pipeline import Pipeline
from data.preference_samples import SamplesWithRefLogps
from data.samples import Samples
from data.seq2seq import SEQ2SEQ, PackedExamples, make_random_examples
from data.task import SAMPLE_FOLDER, check_task_and_files

TOKENIZER = str(SAMPLE_FOLDER / "chat_tokenizer")
MIX = """
pairs:
  train: pairs.jsonl
  weight: 3
chats:
  train: "chat*.jsonl"
  weight: 2
  loss_on: last_turn
tables:
  train: table.csv
  prompt: "Q: {q} A:"
  target: " {a}"
  weight: 1
texts:
  train: texts/
  weight: 2
"""


def folder_of(tmp_path: Path, mix: str = MIX) -> Path:
    """A mixture and its files."""
    pairs = [{"prompt": f"Anna {n}", "completion": f" took lamp {n}"} for n in range(30)]
    talk = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Paul"}] * 2
    rows = {"pairs.jsonl": pairs, "chats.jsonl": [{"messages": talk}] * 5}
    for name, content in rows.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    (tmp_path / "table.csv").write_text("q,a\nWhere?,garden\n")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("Sara left the house. " * 40)
    (tmp_path / "mix.yml").write_text(mix)
    return tmp_path / "mix.yml"


def run_of(mix: Path, **data: Any) -> Pipeline:
    model = {"eos_token_id": 0, "pad_token_id": 1, "embedding": {"vocab_size": 640}}
    own = {"train": str(mix), "tokenizer": TOKENIZER, "examples_per_sample": 1, **data}
    given = {"model": model | {"sequence_length": 64}, "data": own}
    return Pipeline(GPTJConfig.from_dict(given), CAUSAL_LM)


def texts_of(batch: dict[str, np.ndarray], data: Pipeline) -> list[tuple[str, str]]:
    """What samples read and what they learn."""
    base = data.tokenizer.hf_tokenizer
    return [
        (base.decode(input_ids[there > 0]), base.decode(labels[labels >= 0]))
        for input_ids, there, labels in zip(
            *map(batch.__getitem__, ("input_ids", "segment_ids", "labels")), strict=True
        )
    ]


# ---- shares -------------------------------------------------------------------------------------
def stream(first: int, samples: int) -> TokenBlocks:
    """Samples of one token, which says which one it is."""
    return TokenBlocks(np.arange(first, first + samples + 1, dtype=np.int32), 1)


def test_shares_are_those_of_interleave_datasets_and_every_sample_is_there():
    sizes, weights = (30, 5, 200), (3.0, 1.0, 4.0)
    starts = (0, 1000, 2000)
    mixed = MixtureSamples.mix_by_weights(
        [stream(*one) for one in zip(starts, sizes, strict=True)], weights
    )
    tokens = mixed.take(np.arange(len(mixed)))["input_ids"][:, 0]
    counts = np.bincount(tokens // 1000)
    np.testing.assert_allclose(counts / len(mixed), np.array(weights) / 8, atol=0.005)
    for first, size in zip(starts, sizes, strict=True):
        times = np.bincount(tokens[tokens // 1000 == first // 1000] - first, minlength=size)
        assert (len(times), times.min() >= 1, np.ptp(times) <= 1) == (size, True, True)
    theirs = datasets.interleave_datasets(
        [datasets.Dataset.from_dict({"t": np.arange(size)}) for size in sizes],
        probabilities=[w / 8 for w in weights], seed=0, stopping_strategy="all_exhausted",
    )  # fmt: skip
    assert abs(len(theirs) - len(mixed)) < 0.2 * len(mixed)  # theirs are drawn


def epochs_of(mixed: Samples, seed: int, epochs: int) -> np.ndarray:
    """The tokens of some epochs, [epochs, samples]."""
    loader = Loader(mixed, len(mixed), seed)
    return np.stack([loader.next_batch()["input_ids"][:, 0] for _ in range(epochs)])


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "with a reference"])
def test_another_part_comes_again_in_each_epoch_and_all_equally_often(wrapped):
    mixed: Samples = MixtureSamples.mix_by_weights([stream(0, 100), stream(1000, 10)], [10.0, 1.4])
    assert isinstance(mixed, MixtureSamples)
    assert mixed.samples_per_epoch == [100, 14]
    if wrapped:
        mixed = SamplesWithRefLogps(mixed, np.zeros((len(mixed), 1, 2), np.float32))
    found = epochs_of(mixed, 0, 10)
    doubled = []
    for epoch in found:
        times = np.bincount(epoch[epoch >= 1000] - 1000, minlength=10)
        assert (times.min(), times.max(), np.unique(epoch[epoch < 1000]).size) == (1, 2, 100)
        doubled.append(frozenset(np.flatnonzero(times == 2)))
    assert len(set(doubled)) == 5
    assert len(doubled[0] | doubled[1] | doubled[2]) == 10
    every = np.bincount(found[found >= 1000] - 1000, minlength=10)
    assert every.tolist() == [14] * 10
    other = epochs_of(mixed, 1, 1)[0]
    assert frozenset(np.flatnonzero(np.bincount(other[other >= 1000] - 1000) == 2)) != doubled[0]


def test_without_weights_each_is_read_once():
    mixed = MixtureSamples.mix_by_weights([stream(0, 30), stream(1000, 5)], [None, None])
    assert mixed.samples_per_epoch == [30, 5]


def test_samples_of_several_rows_keep_together():
    drawn = make_random_examples(40, 50, 8, 4, seed=0)
    parts = [
        PackedExamples.from_examples(drawn, 3),
        PackedExamples.from_examples(make_random_examples(9, 50, 8, 4, 1), 3),
    ]
    mixed = MixtureSamples.mix_by_weights(parts, [1.0, 1.0])
    chosen = np.random.default_rng(0).permutation(len(mixed))[:10]
    batch = mixed.take(chosen)
    places = SEQ2SEQ.to_program_inputs(batch)["labels"].reshape(10, 3, 4)
    for index, input_ids, labels in zip(chosen, batch["input_ids"], places, strict=True):
        one = mixed.take([index])
        np.testing.assert_array_equal(input_ids, one["input_ids"][0])
        np.testing.assert_array_equal(labels, one["labels"])


# ---- sources ------------------------------------------------------------------------------------
def test_each_source_is_read_as_it_says(tmp_path, capsys):
    data = run_of(folder_of(tmp_path), loss_on="completion")
    samples = data.make_training_samples()
    found = texts_of(samples.take(np.arange(len(samples))), data)
    assert ("Anna 7 took lamp 7", " took lamp 7<|im_end|>") in found
    assert ("Q: Where? A: garden", " garden<|im_end|>") in found
    (chat,) = {(read, learned) for read, learned in found if "im_start" in read}
    assert (chat[0].count("Paul"), chat[1]) == (2, "Paul<|im_end|>")  # the last turn alone
    assert any(read == learned[: len(read)] or "Sara" in learned for read, learned in found)
    said = capsys.readouterr().err
    assert (
        f"a mixture of {len(samples)} samples: pairs 30 (1 times each), chats 20 (4 times" in said
    )
    assert (data.config.data.format, data.config.data.separator) == ("conversational", None)
    lengths = measure_lengths(data, ["train"])
    assert lengths.examples == 30 + 5 + 1 + 1
    assert lengths.longest > 200  # of the text


def test_what_a_run_filled_in_does_not_become_a_sources(tmp_path):
    """A run that is continued begins from its config.yml."""
    first = run_of(folder_of(tmp_path))
    again = Pipeline(first.config, CAUSAL_LM)
    assert first.make_training_samples().digest == again.make_training_samples().digest


def test_the_order_follows_from_the_seed_and_continues_bit_for_bit(tmp_path):
    mix = folder_of(tmp_path)
    whole, begun, continued = (Loader(run_of(mix).make_training_samples(), 7, 3) for _ in range(3))
    batches = [whole.next_batch() for _ in range(20)]  # more than an epoch
    for _ in range(9):
        begun.next_batch()
    continued.restore(json.loads(json.dumps(begun.state())))
    for batch in batches[9:]:
        again = continued.next_batch()
        for name, array in batch.items():
            np.testing.assert_array_equal(again[name], array)
    other = Loader(run_of(folder_of_weight(mix, 5)).make_training_samples(), 7, 3)
    with pytest.raises(ValueError, match="the run that is continued had"):
        other.restore(begun.state())


def folder_of_weight(mix: Path, weight: int) -> Path:
    mix.write_text(MIX.replace("weight: 3", f"weight: {weight}"))
    return mix


@pytest.mark.parametrize(
    ("mix", "said"),
    [
        ("a: 3", "mix.yml: a must be a section that says train: FILE"),
        ("a: {weight: 1}", "must be a section that says train"),
        ("a: {train: x.jsonl, weight: 0}", "line 1: the weight is 0, but must be a positive"),
        ("a: {train: x.jsonl, weight: .inf}", "must be a positive"),
        ("a: {train: x.jsonl, weight: true}", "must be a positive"),
        ("a: {train: x.jsonl, seed: 1}", "line 1: a source of a mixture has no field seed: it has"),
        (
            "a: {train: x.jsonl, loss_on: some}",
            "line 1: a.loss_on is 'some', but must be one of all",
        ),
        ("a: {train: x.jsonl, weight: 1}\nb: {train: y.jsonl}", "b has no weight: give each"),
        ("{}", "it has no source"),
        ("a: {train: mix.yml}", "a is a mixture, but a mixture has files"),
        ("a: {train: x.jsonl}", "cannot read x.jsonl: No such file"),
        ("a", "must hold a mapping"),
    ],
)
def test_mixtures_that_cannot_be_meant(tmp_path, mix, said):
    path = folder_of(tmp_path, mix)
    with pytest.raises(UserError, match=said) as error:
        check_task_and_files(run_of(path).user_config.data)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_a_fraction_of_a_mixture_is_refused_and_a_file_validates(tmp_path):
    mix = folder_of(tmp_path)
    with pytest.raises(UserError, match="no fraction of a mixture is held out: name a file"):
        check_task_and_files(run_of(mix, validation="0.1").user_config.data)
    data = run_of(mix, validation=str(tmp_path / "chats.jsonl"))
    assert len(data.read_corpus("validation").examples) == 5
    assert len(data.make_training_samples()) > 0
