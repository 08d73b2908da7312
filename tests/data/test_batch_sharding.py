"""Which sample of a global batch goes to which replica and micro-batch."""

from __future__ import annotations

import numpy as np
import pytest

from data.loader import BatchSharding

SPLITS = [(1, 1, 1), (2, 1, 1), (1, 4, 3), (2, 2, 3), (4, 2, 1), (3, 1, 4), (3, 2, 2), (2, 6, 2)]


@pytest.mark.parametrize(("data_parallel", "tensor_parallel", "accumulation"), SPLITS)
def test_each_replica_gets_its_micro_batches(
    data_parallel: int, tensor_parallel: int, accumulation: int
) -> None:
    micro_batch = 2
    count = data_parallel * accumulation * micro_batch
    samples = np.arange(count * 5).reshape(count, 5)
    fed = BatchSharding(data_parallel, tensor_parallel, accumulation).distribute_to_replicas(
        samples
    )
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
    fed = BatchSharding(data_parallel, tensor_parallel, accumulation).distribute_to_replicas(
        samples
    )
    for member in range(tensor_parallel):
        np.testing.assert_array_equal(fed[:, member::tensor_parallel].reshape(-1), samples)
    assert fed.dtype == samples.dtype


@pytest.mark.parametrize(("data_parallel", "tensor_parallel", "accumulation"), SPLITS)
@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 12])
def test_processes_read_their_part_and_feed_what_one_would(
    data_parallel: int, tensor_parallel: int, accumulation: int, processes: int
) -> None:
    """Also where a copy's replicas are in several processes, and where one has parts of two."""
    replicas = data_parallel * tensor_parallel
    if replicas % processes:
        return
    samples = np.arange(24 * 2).reshape(24, 2)
    places = np.arange(24 * 3 * 2).reshape(24 * 3, 2)  # three rows for each sample
    split = data_parallel, tensor_parallel, accumulation
    fed, fed_places, counted = [], [], []
    for first in range(0, replicas, replicas // processes):
        sharding = BatchSharding(*split, slice(first, first + replicas // processes))
        own = sharding.local_sample_indices(24)
        rows = places.reshape(24, 3, 2)[own].reshape(-1, 2)
        fed.append(sharding.distribute_to_replicas(samples[own]))
        fed_places.append(sharding.distribute_to_replicas(rows))
        once = sharding.drop_replicated_samples({"samples": samples[own], "rows": rows})
        assert len(once["rows"]) == 3 * len(once["samples"])
        counted.append(once["samples"])
    whole = BatchSharding(*split)
    np.testing.assert_array_equal(np.concatenate(fed, 1), whole.distribute_to_replicas(samples))
    np.testing.assert_array_equal(
        np.concatenate(fed_places, 1), whole.distribute_to_replicas(places)
    )
    found = np.concatenate(counted)
    np.testing.assert_array_equal(found[found[:, 0].argsort()], samples)


def test_a_process_reads_no_more_than_its_copies_take() -> None:
    assert BatchSharding(4, 2, 2, slice(2, 4)).local_sample_indices(16).tolist() == [2, 3, 10, 11]
    assert BatchSharding(2, 4, 1, slice(4, 6)).local_sample_indices(4).tolist() == [2, 3]


def test_a_batch_that_cannot_be_cut_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="10 samples cannot be cut into 2 micro-batches for each"):
        BatchSharding(3, 1, 2).local_sample_indices(10)
