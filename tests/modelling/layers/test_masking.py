"""Masks of both conventions: 1 keeps, as in T5X, or 1 drops, as in Transformer Engine."""

from __future__ import annotations

import numpy as np
import pytest

from modelling.layers import MASK_VALUE, invert_mask, padding_bias
from tests.popxl.ops.harness import evaluate

KEEPS = np.array([[1, 1, 0], [1, 0, 0]], np.int32)
DROPS = np.array([[0, 0, 1], [0, 1, 1]], np.int32)


@pytest.mark.parametrize("dtype", [np.int32, np.bool_])
def test_a_mask_is_converted_both_ways(dtype):
    keeps, drops = KEEPS.astype(dtype), DROPS.astype(dtype)

    def both(a, b):
        return [invert_mask(a), invert_mask(b), invert_mask(invert_mask(a))]

    to_drops, to_keeps, there_and_back = evaluate(both, keeps, drops)
    np.testing.assert_array_equal(to_drops, drops)
    np.testing.assert_array_equal(to_keeps, keeps)
    np.testing.assert_array_equal(there_and_back, keeps)
    assert to_drops.dtype == dtype


def test_a_mask_of_either_convention_hides_the_same_positions():
    def both(keeps, drops):
        return [padding_bias(keeps), padding_bias(invert_mask(drops))]

    of_keeps, of_drops = evaluate(both, KEEPS, DROPS)
    np.testing.assert_array_equal(of_keeps[:, 0, 0], np.where(KEEPS, 0, np.float32(MASK_VALUE)))
    np.testing.assert_array_equal(of_keeps, of_drops)
