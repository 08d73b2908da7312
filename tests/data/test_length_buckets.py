"""Batches of samples of one bucket of lengths: order, resuming, and which samples they hold."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from config.errors import ConfigError
from config.length_buckets import bucket_configs, bucket_lengths, unused_bucket_lengths
from config.presets import load_config
from config.t5 import T5Config
from data.loader import Loader
from data.mixture import MixtureSamples
from data.packing import EMPTY_SLOT
from data.samples import longest_sample, sample_lengths
from data.seq2seq import EncodedExamples, PackedExamples
from files.errors import FileError

LENGTHS = (8, 16, 32)


def make_samples(count: int, seed: int = 0) -> EncodedExamples:
    """Prompts whose tokens are the number of their example."""
    lengths = np.random.default_rng(seed).integers(1, LENGTHS[-1] + 1, count)
    offsets = np.cumsum([0, *lengths])
    tokens = np.repeat(np.arange(count), lengths).astype(np.int32)
    return EncodedExamples(tokens, offsets, np.zeros((count, 2), np.int32), LENGTHS[-1], pad=0)


def indices(batch: dict[str, np.ndarray]) -> list[int]:
    return batch["input_ids"][:, 0].tolist()


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_has_samples_of_one_bucket_and_an_epoch_each_sample_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, size = int(rng.integers(20, 120)), int(rng.integers(1, 9))
    samples = make_samples(count, seed)
    loader = Loader(samples, size, seed, lengths=LENGTHS)
    seen, drawn = Counter[int](), 0
    while drawn < 5 * count:
        batch = loader.next_batch()
        buckets = np.searchsorted(LENGTHS, samples.lengths[indices(batch)])
        assert len(set(buckets)) == 1
        assert longest_sample(batch) <= LENGTHS[buckets[0]]
        seen.update(indices(batch))
        drawn += size
        assert loader.num_samples_seen == drawn
    waiting = len(LENGTHS) * (size - 1)
    assert sum(seen.values()) == drawn
    assert max(seen.values()) - min(seen[n] for n in range(count)) <= 2
    assert sum(abs(seen[n] - drawn // count) > 1 for n in range(count)) <= waiting


@pytest.mark.parametrize("steps", [0, 1, 7, 30])
def test_a_restored_loader_continues_bit_for_bit(steps: int) -> None:
    samples, size = make_samples(50), 6
    loader = Loader(samples, size, 3, lengths=LENGTHS)
    for _ in range(steps):
        loader.next_batch()
    state = json.loads(json.dumps(loader.state()))
    other = Loader(samples, size, 4, lengths=LENGTHS)
    other.next_batch()
    other.restore(state)
    assert other.num_samples_seen == steps * size
    for _ in range(20):
        assert indices(other.next_batch()) == indices(loader.next_batch())
    assert other.state() == loader.state()


def test_a_run_can_continue_with_other_buckets_and_batches() -> None:
    samples = make_samples(40)
    loader = Loader(samples, 6, 3, lengths=LENGTHS)
    seen = Counter(n for _ in range(4) for n in indices(loader.next_batch()))
    for size, lengths in ((3, LENGTHS[1:]), (2, ())):
        state = loader.state()
        loader = Loader(samples, size, 3, lengths=lengths)
        loader.restore(state)
        seen.update(n for _ in range(2) for n in indices(loader.next_batch()))
    assert max(seen.values()) == 1, "a sample came twice in an epoch"


def test_without_buckets_batches_come_in_the_order_of_the_epoch() -> None:
    samples = make_samples(40)
    plain, one = Loader(samples, 7, 3), Loader(samples, 7, 3, lengths=(32,))
    expected = Loader(samples, 1, 3)
    for _ in range(15):
        batch = indices(plain.next_batch())
        assert batch == indices(one.next_batch())
        assert batch == [indices(expected.next_batch())[0] for _ in range(7)]
    assert "waiting" not in plain.state()


@pytest.mark.parametrize("waiting", [[50], [-1], ["x"], 3])
def test_a_damaged_position_is_refused(waiting: Any) -> None:
    loader = Loader(make_samples(50), 6, 3, lengths=LENGTHS)
    with pytest.raises((ValueError, FileError), match="saved data position"):
        loader.restore(loader.state() | {"waiting": waiting})


def test_lengths_of_packed_and_mixed_samples() -> None:
    examples = make_samples(9)
    packed = PackedExamples.from_examples(examples, 4)
    expected = [
        sum(examples.lengths[i] for i in sample if i != EMPTY_SLOT) for sample in packed.samples
    ]
    assert sample_lengths(packed).tolist() == expected
    mixed = MixtureSamples.mix_by_weights([examples, make_samples(4, 1)], [1, 2])
    batch = mixed.take(np.arange(len(mixed)))
    assert sample_lengths(mixed).tolist() == batch["segment_ids"].sum(1).tolist()


# ---- configuration -------------------------------------------------------------------------------
def config_of(buckets: Any, **execution: Any) -> T5Config:
    overrides = {"data": {"length_buckets": buckets}, "execution": execution}
    return load_config(T5Config, "finetuning", "tiny", overrides)


@pytest.mark.parametrize(
    ("buckets", "lengths", "unused"),
    [
        (None, (32,), ()),
        ("16,8", (8, 16, 32), ()),
        ([8, 32, 64], (8, 32), (32, 64)),
        (16, (16, 32), ()),
    ],
)
def test_buckets_end_with_the_sequence_length(
    buckets: Any, lengths: tuple[int, ...], unused: tuple[int, ...]
) -> None:
    config = config_of(buckets)
    assert bucket_lengths(config) == lengths
    assert unused_bucket_lengths(config) == unused
    assert [one.model.sequence_length for one in bucket_configs(config)] == [*lengths[:-1]]
    assert all(
        bucket_lengths(one) == (one.model.sequence_length,) for one in bucket_configs(config)
    )


@pytest.mark.parametrize("buckets", ["", "8,", "0", "-8", "8.5", "x", [8, [9]], "9999999999"])
def test_what_is_no_list_of_lengths_is_refused(buckets: Any) -> None:
    with pytest.raises(ConfigError, match="length_buckets is .* positive integers, separated"):
        config_of(buckets)


def test_what_buckets_cannot_be_used_with_is_said() -> None:
    with pytest.raises(ConfigError, match="device_iterations must be 1, not 2"):
        config_of("8", device_iterations=2)
    with pytest.raises(ConfigError, match="has 12, which must be divisible by .* 8"):
        config_of("16,12", attention_serialisation=8)
