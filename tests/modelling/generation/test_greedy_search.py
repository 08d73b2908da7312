"""The choice of the most probable token, with the vocabulary whole or cut over replicas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import popxl
from modelling.generation import GreedyStrategy, SearchContext, SpecialTokenIds
from modelling.layers import ParallelGroups
from popxl import ops

NAN = float("nan")
LOGITS = np.array(
    [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [7, 6, 5, 4, 3, 2, 1, 0],
        [1, 9, 1, 9, 1, 9, 1, 9],  # equal ones on different replicas
        [-5, -5, -5, -5, -5, -5, -5, -5],
        [-1e30, -1e30, -1e30, -3e38, -1e30, -1e30, -2, -1e30],
    ],
    np.float32,
)


def choose_tokens(logits: np.ndarray, data_parallel: int, tensor_parallel: int) -> np.ndarray:
    """What each replica chooses: (replicas, batch). All data-parallel copies get the same."""
    batch = len(logits)
    ir = popxl.Ir(replication=data_parallel * tensor_parallel)
    with ir.main_graph:
        groups = ParallelGroups.from_current_ir(tensor_parallel)
        search = GreedyStrategy().create_search(SearchContext(groups, SpecialTokenIds(0, 0), 1))
        parts = np.split(logits, tensor_parallel, 1)
        part = popxl.variable(
            np.stack(parts) if tensor_parallel > 1 else parts[0],
            replica_grouping=groups.sharded,
        )
        out = popxl.d2h_stream((batch,), popxl.int32)
        ops.host_store(out, search.choose_tokens(part, popxl.constant(0), []))
    with popxl.Session(ir, "cpu") as session:
        return session.run()[out].reshape(-1, batch)


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (1, 2), (2, 4)])
def test_greedy_is_argmax_on_every_replica(dp, tp):
    expected = torch.tensor(LOGITS).argmax(-1).numpy()
    np.testing.assert_array_equal(choose_tokens(LOGITS, dp, tp), np.tile(expected, (dp * tp, 1)))


def test_nan_still_gives_a_token_of_the_vocabulary():
    """A broken model must not produce indices that no embedding has."""
    tokens = choose_tokens(np.full((3, 8), NAN, np.float32), 1, 4)
    assert ((tokens >= 0) & (tokens < 8)).all()
