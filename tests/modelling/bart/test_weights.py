"""The table of BART's weights, with the bias of the logits, which is a buffer."""

from __future__ import annotations

import numpy as np

from data.seq2seq import shift_right
from modelling.model_family import get_family
from modelling.weights.weight_mapping import is_linear
from tests.modelling.bart.hf import PAD, START, our_config, weights_of, without_bias
from tests.modelling.weight_maps import base_weight_map

BIAS = "final_logits_bias"


def test_the_table_has_transformers_weights() -> None:
    shapes = {name: x.shape for name, x in weights_of(without_bias()).items()}
    weight_map = base_weight_map(our_config(tp=2))
    assert {w.name: w.shape for w in weight_map.weights} == shapes
    maps = [w.name for row in weight_map.mappings if is_linear(row) for w in row.weights]
    assert len(maps) == 2 * 6 + 3 * 10
    assert weight_map.phases["decoder_embeddings"] == ("decoder_embeddings",)


def test_the_bias_of_logits_is_saved_but_not_updated() -> None:
    """Beside adapters it is the base's, whatever `training.frozen` says."""
    fields = {"training.frozen": "model.shared.weight"}
    for config in (our_config(), our_config().with_values(fields)):
        weight_map = get_family(config).weight_map(config)
        (row,) = (row for row in weight_map.mappings if row.is_buffer)
        assert row.trainable
        assert not row.is_updated
        assert BIAS in {w.name for w in weight_map.trainable_weights}
    config = our_config().with_values({"adapter.rank": 2})
    assert BIAS in get_family(config).weight_map(config).frozen_names


def test_adapters_are_of_queries_and_values_by_default() -> None:
    config = our_config().with_values({"adapter.rank": 2})
    rows = get_family(config).weight_map(config).mappings
    modules = {a.module for row in rows for a in row.adapters}
    assert len(modules) == 2 * 2 + 3 * 4
    assert {name.rpartition(".")[2] for name in modules} == {"q_proj", "v_proj"}


def test_the_decoder_reads_its_start_token_first() -> None:
    labels = np.array([[5, 6, -100]])
    np.testing.assert_array_equal(shift_right(labels, PAD, START), [[START, 5, 6]])
    np.testing.assert_array_equal(shift_right(labels, PAD), [[PAD, 5, 6]])
