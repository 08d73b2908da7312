"""Which sample of a global batch goes to which replica and micro-batch."""

from __future__ import annotations

import numpy as np
import pytest

from data.feed import per_replica

SPLITS = [(1, 1, 1), (2, 1, 1), (1, 4, 3), (2, 2, 3), (4, 2, 1), (3, 1, 4)]


@pytest.mark.parametrize(("data_parallel", "tensor_parallel", "accumulation"), SPLITS)
def test_each_replica_gets_its_micro_batches(
    data_parallel: int, tensor_parallel: int, accumulation: int
) -> None:
    micro_batch = 2
    count = data_parallel * accumulation * micro_batch
    samples = np.arange(count * 5).reshape(count, 5)
    fed = per_replica(samples, data_parallel, tensor_parallel, accumulation)
    assert fed.shape == (accumulation, data_parallel * tensor_parallel, micro_batch, 5)
    for step in range(accumulation):
        for replica in range(data_parallel * tensor_parallel):
            copy = replica // tensor_parallel
            first = (step * data_parallel + copy) * micro_batch
            expected = samples[first : first + micro_batch]
            np.testing.assert_array_equal(fed[step, replica], expected)


@pytest.mark.parametrize(("data_parallel", "tensor_parallel", "accumulation"), SPLITS)
def test_one_member_of_each_copy_has_the_batch_in_order(
    data_parallel: int, tensor_parallel: int, accumulation: int
) -> None:
    samples = np.arange(24, dtype=np.int32)
    fed = per_replica(samples, data_parallel, tensor_parallel, accumulation)
    for member in range(tensor_parallel):
        np.testing.assert_array_equal(fed[:, member::tensor_parallel].reshape(-1), samples)
    assert fed.dtype == samples.dtype


def test_a_batch_that_cannot_be_cut_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="10 samples cannot be cut into 2 micro-batches for each"):
        per_replica(np.zeros(10), 3, 1, 2)
