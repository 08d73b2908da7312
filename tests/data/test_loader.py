"""The order of training batches: complete, seeded, and continued bit for bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.loader import Loader, shuffle_epoch


class Indices:
    """Samples that are their own indices."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    @property
    def digest(self) -> str:
        return str(self.count)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"index": np.asarray(indices)}


def read(loader: Loader, batches: int) -> np.ndarray:
    return np.concatenate([loader.next_batch()["index"] for _ in range(batches)])


def order_of(seed: int, epoch: int, count: int) -> list[int]:
    """Samples sorted by one number of the Philox generator each."""
    generator = np.random.Philox(np.random.SeedSequence([seed, epoch]))
    keys = [int(generator.random_raw()) for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


@given(count=st.integers(1, 40), batch_size=st.integers(1, 100), seed=st.integers(0, 2**32))
def test_every_epoch_has_each_sample_once(count: int, batch_size: int, seed: int) -> None:
    batches = -(-3 * count // batch_size)
    stream = read(Loader(Indices(count), batch_size, seed), batches)
    assert len(stream) == batches * batch_size
    for epoch in range(3):
        samples = stream[epoch * count : (epoch + 1) * count]
        np.testing.assert_array_equal(np.sort(samples), np.arange(count))
        np.testing.assert_array_equal(samples, order_of(seed, epoch, count))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(shuffle_epoch(seed, epoch, 50)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_the_order_never_changes() -> None:
    """Checkpoints of earlier versions rely on it."""
    assert shuffle_epoch(2023, 1, 10).tolist() == [5, 8, 6, 3, 7, 4, 1, 0, 2, 9]


def test_positions_are_shuffled_evenly() -> None:
    """Mean position of each sample over many epochs, against that of a fair shuffle."""
    count, epochs = 20, 2000
    positions = np.stack([np.argsort(shuffle_epoch(7, epoch, count)) for epoch in range(epochs)])
    deviation = np.sqrt((count**2 - 1) / 12 / epochs)
    assert np.abs(positions.mean(axis=0) - (count - 1) / 2).max() < 5 * deviation


@given(count=st.integers(1, 30), batch_size=st.integers(1, 50), before=st.integers(0, 7))
def test_a_restored_loader_continues_with_the_same_batches(
    count: int, batch_size: int, before: int
) -> None:
    loader = Loader(Indices(count), batch_size, seed=5)
    read(loader, before) if before else None
    state = json.loads(json.dumps(loader.state()))
    restored = Loader(Indices(count), batch_size, seed=99)
    restored.restore(state)
    np.testing.assert_array_equal(read(restored, 5), read(loader, 5))
    assert restored.state() == loader.state()


def test_another_batch_size_continues_the_same_stream() -> None:
    small, large = (Loader(Indices(17), size, seed=1) for size in (4, 6))
    np.testing.assert_array_equal(read(small, 9), read(large, 6))
    large.restore(small.state())
    np.testing.assert_array_equal(read(small, 3), read(large, 2))


def test_the_state_of_another_data_set_is_refused() -> None:
    loader = Loader(Indices(10), 2, seed=0)
    with pytest.raises(ValueError, match="had 11 samples, but there are 10"):
        loader.restore(Loader(Indices(11), 2, seed=0).state())


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="no samples to train on"):
        Loader(Indices(0), 2, seed=0)
