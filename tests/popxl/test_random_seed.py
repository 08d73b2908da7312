"""Seeds: distinct, reproducible, and continued by an offset."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl.random_seed import counter_seeds, two_uint32_to_uint64, uint64_to_two_uint32


def test_seeds_have_a_shape_without_ones():
    assert popxl.create_seeds(1).shape == (2,)
    assert popxl.create_seeds(1, batches_per_step=3).shape == (3, 2)
    seeds = popxl.create_seeds(1, 0, 3, 1, 4)
    assert (seeds.shape, seeds.dtype) == ((3, 4, 2), np.uint32)
    assert popxl.create_seeds(1, 0, 3, 5, 4).shape == (3, 5, 4, 2)


def test_seeds_are_those_of_numpys_generator():
    """Programs keep such seeds in files: the numbers stay."""
    raw = np.random.default_rng(7 + 3).integers(0, 2**64 - 1, 12, np.uint64, endpoint=True)
    pairs = [uint64_to_two_uint32(int(x)) for x in raw]
    seeds = popxl.create_seeds(7, 3, 3, 4)
    np.testing.assert_array_equal(seeds, np.reshape(pairs, (3, 4, 2)))
    assert popxl.create_seeds(0).tolist() == [2735729615, 3653403231]


def test_counted_seeds_differ_from_each_other_and_between_parents():
    sets = [counter_seeds(parent, 0, 256) for parent in (0, 1, 2**64 - 1)]
    everything = np.concatenate(sets)
    assert everything.dtype == np.uint32
    assert len(np.unique(everything, axis=0)) == len(everything)
    np.testing.assert_array_equal(sets[0], counter_seeds(0, 0, 256))


def test_an_offset_skips_whole_runs():
    runs = [counter_seeds(7, offset, 8) for offset in range(3)]
    np.testing.assert_array_equal(np.concatenate(runs), counter_seeds(7, 0, 24))
    assert counter_seeds(7).shape == (1, 2)


@pytest.mark.parametrize("wrong", [-1, 2**64])
def test_seeds_out_of_range_are_errors(wrong):
    with pytest.raises(ValueError, match=r"seed must be in \[0, 2\*\*64\)"):
        popxl.create_seeds(wrong)
    with pytest.raises(ValueError, match=r"seed must be in \[0, 2\*\*64\)"):
        counter_seeds(wrong)
    with pytest.raises(ValueError, match="number must be in"):
        uint64_to_two_uint32(wrong)
    with pytest.raises(ValueError, match="number must be in"):
        two_uint32_to_uint64(wrong, 0)


@pytest.mark.parametrize("number", [0, 1, 2**32 - 1, 2**32, 2**64 - 1, 0x0123456789ABCDEF])
def test_halves_are_joined_again(number):
    high, low = uint64_to_two_uint32(number)
    assert (high, low) == (number // 2**32, number % 2**32)
    assert two_uint32_to_uint64(high, low) == number
