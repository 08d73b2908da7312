"""Several sequences in a sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.packing import EMPTY_SLOT, concatenate_packed_sequences, pack_sequences
from data.samples import IGNORE_INDEX
from data.seq2seq import EncodedExamples, PackedExamples
from data.truncation import TruncationCounts

CAPACITY = 16


def sequences(lengths: list[int]) -> list[np.ndarray]:
    """Tokens that tell where they come from: 100 * index + position + 1."""
    return [100 * i + 1 + np.arange(n, dtype=np.int32) for i, n in enumerate(lengths)]


@given(st.lists(st.integers(1, CAPACITY), max_size=60), st.integers(1, 5))
def test_each_sequence_is_in_one_sample_that_holds_it(lengths: list[int], most: int) -> None:
    samples = pack_sequences(lengths, CAPACITY, most)
    assert samples.shape[1] == most
    indices = samples[samples != EMPTY_SLOT]
    assert sorted(indices.tolist()) == list(range(len(lengths)))
    for sample in samples:
        kept = sample[sample != EMPTY_SLOT]
        assert 0 < sum(lengths[i] for i in kept) <= CAPACITY or most == 1
        np.testing.assert_array_equal(sample[: len(kept)], kept)  # the empty places are the last


@given(st.lists(st.integers(1, CAPACITY), max_size=60), st.integers(2, 5))
def test_samples_are_not_wasted(lengths: list[int], most: int) -> None:
    """No two with places left are filled by half or less: one would have gone to the other."""
    samples = pack_sequences(lengths, CAPACITY, most)
    least = max(-(-sum(lengths) // CAPACITY), -(-len(lengths) // most))
    assert len(samples) >= least
    filled = [sum(lengths[i] for i in sample[sample != EMPTY_SLOT]) for sample in samples]
    loose = [
        n
        for n, sample in zip(filled, samples, strict=True)
        if n * 2 <= CAPACITY and EMPTY_SLOT in sample
    ]
    assert len(loose) <= 1


def test_one_in_a_sample_keeps_the_order() -> None:
    np.testing.assert_array_equal(pack_sequences([3, 9, 1], CAPACITY, 1), [[0], [1], [2]])


def test_a_long_sequence_is_filled_up_with_short_ones() -> None:
    samples = pack_sequences([4, 12, 9, 3, 4], CAPACITY, 3)
    np.testing.assert_array_equal(samples, [[1, 0, EMPTY_SLOT], [2, 4, 3]])


def test_samples_hold_the_tokens_and_their_places() -> None:
    given = sequences([3, 2, 4])
    input_ids, segment_ids = concatenate_packed_sequences(
        np.array([[2, 0], [1, EMPTY_SLOT]]), given.__getitem__, 8, pad=7
    )
    np.testing.assert_array_equal(
        input_ids, [[201, 202, 203, 204, 1, 2, 3, 7], [101, 102, *[7] * 6]]
    )
    np.testing.assert_array_equal(segment_ids, [[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, *[0] * 6]])


@pytest.fixture
def packed() -> PackedExamples:
    """Five examples, whose targets are their index + 50, and the end."""
    prompts = sequences([4, 12, 9, 3, 4])
    targets = np.array([[50 + i, 1, IGNORE_INDEX] for i in range(5)], np.int32)
    starts = np.cumsum([0, *map(len, prompts)])
    examples = EncodedExamples(
        np.concatenate(prompts), starts, targets, CAPACITY, 0, TruncationCounts(prompts=2)
    )
    return PackedExamples.from_examples(examples, 3)


def test_a_batch_has_the_samples(packed: PackedExamples) -> None:
    assert (len(packed), packed.truncation_counts.prompts) == (2, 2)


def test_a_batch_has_a_target_for_each_place(packed: PackedExamples) -> None:
    batch = packed.take([1, 0])
    assert {a.dtype for a in batch.values()} == {np.dtype(np.int32)}
    np.testing.assert_array_equal(batch["segment_ids"][0], np.repeat([1, 2, 3], [9, 4, 3]))
    np.testing.assert_array_equal(batch["labels"][:, 0], [52, 54, 53, 51, 50, IGNORE_INDEX])
    np.testing.assert_array_equal(batch["decoder_input_ids"][3], [0, 51, 1])
    np.testing.assert_array_equal(batch["decoder_input_ids"][5], [0, 0, 0])  # nothing is there
