"""Parts of variables, put together again as the logical tensors that the variables are made of."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

from checkpoints.tensor_shards import assemble_tensor, check_shards_cover_tensor
from modelling.weights import Weight, WeightMapping
from modelling.weights.variables import VariableLayout

JOINED = [(axis, cut, count) for axis in (0, 1) for cut in (True, False) for count in (1, 3)]
SHARED_OUT = 6  # whole weights, of which each part has as many


@pytest.mark.parametrize(
    ("axis", "cut", "count"), [(None, True, 1), *JOINED, (0, True, SHARED_OUT)]
)
@pytest.mark.parametrize("transpose", [False, True])
def test_any_cut_of_any_row_is_put_together(axis, cut, count, transpose):
    """By tensor parallelism of 1 to 3, then into flat shards of 1, 2 and 5 replicas."""
    rng = np.random.default_rng(0)
    for shape, parallel, shards in itertools.product([(7, 5), (6, 6)], (1, 2, 3), (1, 2, 5)):
        weights = tuple(Weight(f"w{i}", shape) for i in range(count))
        row = WeightMapping(
            "path", weights, transpose, axis, cut, expert_parallel=count == SHARED_OUT
        )
        logical = {w.name: rng.standard_normal(shape) for w in weights}
        host = row.to_variable_data(logical, parallel)
        if row.expert_parallel and parallel > 1:
            first = [w.T if transpose else w for w in list(logical.values())[: count // parallel]]
            assert np.array_equal(host[0], np.concatenate(first))
        back = row.to_logical_weights(host, parallel)
        assert all(np.array_equal(back[name], whole) for name, whole in logical.items())
        parts: dict[str, dict] = {w.name: {} for w in weights}
        for group, value in enumerate(host if host.ndim == 3 else host[None]):
            layout = VariableLayout.from_mapping(row, value.shape)
            flat, each = value.reshape(-1), -(-value.size // shards)
            for start in range(0, flat.size, each):
                piece = flat[start : start + each]
                for found in layout.weight_slices(group, start, piece.size):
                    parts[row.weights[found.weight].name][found.part] = partial(
                        found.select_elements, piece
                    )
        for name, whole in logical.items():
            check_shards_cover_tensor(parts[name])
            assert np.array_equal(assemble_tensor(shape, whole.dtype, parts[name]), whole)
            incomplete = dict(list(parts[name].items())[1:])
            if incomplete:
                with pytest.raises(ValueError, match="shard"):
                    check_shards_cover_tensor(incomplete)
