"""The weight map: Hugging Face's weights to variables and back, and initial values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch

import popxl
from modelling.decoder import HEAD
from modelling.weights import Weight, WeightMapping
from popxl_addons import NamedTensors
from tests.modelling.harness import TENSOR_PARALLEL, small_config
from tests.modelling.standalone_modules import encoder_block, t5_head
from tests.modelling.t5.hf import hf_model
from tests.modelling.weight_maps import base_weight_map

CONFIG = small_config()


@pytest.fixture(scope="module")
def hf_weights() -> dict[str, np.ndarray]:
    return {name: p.detach().numpy() for name, p in hf_model(CONFIG).state_dict().items()}


# ---- rows ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("tensor_parallel", TENSOR_PARALLEL)
def test_every_weight_is_used_once_and_comes_back(hf_weights, tensor_parallel):
    weight_map = base_weight_map(small_config(tensor_parallel))
    logical = weight_map.from_hf(hf_weights)
    back: dict[str, np.ndarray] = {}
    for rows in weight_map.layers.values():
        for row in rows:
            data = row.to_variable_data(logical, tensor_parallel)
            assert data.shape[0] == tensor_parallel or row.axis is None or tensor_parallel == 1
            found = row.to_logical_weights(data, tensor_parallel)
            assert not found.keys() & back.keys()
            back.update(found)
    assert back.keys() == hf_weights.keys() - set(weight_map.hf_names.aliases)
    for name, array in back.items():
        assert array.tobytes() == hf_weights[name].tobytes(), name


def test_a_fused_row_holds_each_shards_parts_side_by_side():
    q, k = (np.arange(12.0).reshape(4, 3) + 100 * i for i in range(2))
    row = WeightMapping("qk", (Weight("q", (4, 3)), Weight("k", (4, 3))), transpose=True, axis=1)
    data = row.to_variable_data({"q": q, "k": k}, 2)
    assert data.shape == (2, 3, 4)
    np.testing.assert_array_equal(data[1], np.concatenate([q[2:], k[2:]]).T)


def test_padding_is_added_and_dropped():
    embedding = np.arange(1.0, 11.0).reshape(5, 2)
    row = WeightMapping("weight", (Weight("w", (5, 2)),), axis=0)
    data = row.to_variable_data({"w": embedding}, 4)
    assert data.shape == (4, 2, 2)
    np.testing.assert_array_equal(data[2:], [[[9, 10], [0, 0]], [[0, 0], [0, 0]]])
    np.testing.assert_array_equal(row.to_logical_weights(data, 4)["w"], embedding)


def test_prefixes_name_what_has_the_shape_of_weights():
    row = WeightMapping("w", (Weight("w", (2,)),))
    data = row.to_variable_data(
        {"optimizer/first_order/w": np.ones(2)}, 1, "optimizer/first_order/"
    )
    assert row.to_logical_weights(data, 1, "x/").keys() == {"x/w"}


# ---- names --------------------------------------------------------------------------------------
def test_an_alias_stands_in_for_a_weight(hf_weights):
    weight_map = base_weight_map(CONFIG)
    only_alias = {n: x for n, x in hf_weights.items() if n != "shared.weight"}
    np.testing.assert_array_equal(
        weight_map.from_hf(only_alias)["shared.weight"], hf_weights["shared.weight"]
    )


def test_a_file_of_another_model_is_refused(hf_weights):
    weight_map = base_weight_map(CONFIG)
    lacking = {n: x for n, x in hf_weights.items() if n != "lm_head.weight"}
    with pytest.raises(ValueError, match="missing lm_head.weight, unknown none"):
        weight_map.from_hf(lacking)
    with pytest.raises(ValueError, match="unknown encoder.block.7.x"):
        weight_map.from_hf(hf_weights | {"encoder.block.7.x": np.ones(1)})
    narrow = hf_weights | {"lm_head.weight": np.ones((40, 8))}
    with pytest.raises(ValueError, match=r"'lm_head.weight' has shape \(40, 8\), but .*\(40, 16\)"):
        weight_map.layers[HEAD][1].to_variable_data(weight_map.from_hf(narrow), 1)


def test_only_the_weights_asked_for_are_read(hf_weights):
    read = []

    class File(Mapping):
        def __getitem__(self, name: str) -> np.ndarray:
            read.append(name)
            return hf_weights[name]

        def __iter__(self) -> Iterator[str]:
            return iter(hf_weights)

        def __len__(self) -> int:
            return len(hf_weights)

    weight_map = base_weight_map(CONFIG)
    weight_map.layers[HEAD][0].to_variable_data(weight_map.from_hf(File()), 1)
    assert read == ["decoder.final_layer_norm.weight"]


# ---- initial values -----------------------------------------------------------------------------
def test_initial_values_are_distributed_as_hugging_faces():
    """Compared on weights large enough for their deviations to be known within 3 %."""
    import transformers

    config = small_config(hidden_size=64, d_ff=128, embedding={"vocab_size": 256})
    attention = config.model.attention
    torch.manual_seed(0)
    hf = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=256, d_model=64, d_ff=128, num_layers=2, num_heads=attention.heads,
            d_kv=attention.d_kv, relative_attention_num_buckets=8, feed_forward_proj="gated-gelu",
        )
    ).state_dict()  # fmt: skip
    ours = base_weight_map(config).init_weights(seed=1)
    for name, array in ours.items():
        hf_weights = hf[name].numpy()
        assert array.shape == hf_weights.shape
        assert array.dtype == np.float32
        if array.ndim == 1:
            np.testing.assert_array_equal(array, hf_weights)
        else:
            tolerance = 4 / np.sqrt(array.size)  # of a standard deviation, 5 sigma
            assert abs(array.std() / hf_weights.std() - 1) < tolerance, name
            assert abs(array.mean()) < tolerance * array.std() * 1.5, name


def test_initial_values_depend_on_the_seed_and_name_alone():
    first, wide = (base_weight_map(small_config(tp)).init_weights(3) for tp in (1, 4))
    assert all(np.array_equal(first[n], wide[n]) for n in first)
    other = base_weight_map(CONFIG).init_weights(4)
    random = [n for n in first if first[n].ndim > 1]
    assert all(not np.allclose(first[n], other[n]) for n in random)
    values = [first[n].flat[0] / first[n].std() for n in random]
    assert len(set(values)) == len(values)


# ---- programs -----------------------------------------------------------------------------------
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_programs_variables_and_optimizer_state(hf_weights, tensor_parallel):
    """Phases with lists of layers, as a phased program has, and layers by name."""
    config = small_config(tensor_parallel)
    whole = base_weight_map(config)
    names = ("encoder.0", "encoder.1", HEAD)
    weight_map = type(whole)({n: whole.layers[n] for n in names}, whole.phases, tensor_parallel)
    ir = popxl.Ir(replication=tensor_parallel)
    with ir.main_graph:
        first, second, head = (
            _trees(rows, tensor_parallel, ir) for rows in weight_map.layers.values()
        )
        variables = {"first_encoder_layer": [first], "encoder_block": [second], HEAD: head}
    logical = {w.name: hf_weights[w.name] for w in weight_map.weights}
    state = {f"optimizer/first_order/{n}": x * 2 for n, x in logical.items()}
    steps = {f"optimizer/step/{n}": np.float32(7) for n in logical}
    tensors = logical | state | steps
    data = {v: make() for v, make in weight_map.to_variables(tensors, variables).items()}
    assert list(data) == [s.variable for s in weight_map._variable_sources(variables, True)]
    assert all(x.shape == v.shape_on_host for v, x in data.items())
    back = weight_map.to_logical_tensors(data.__getitem__, variables)
    assert back.keys() == tensors.keys()
    assert all(np.array_equal(back[n], tensors[n]) for n in tensors)
    weights = weight_map.to_variables(logical, variables)
    assert list(weights) == [s.variable for s in weight_map._variable_sources(variables, False)]
    read = data.__getitem__
    assert weight_map.to_logical_tensors(read, variables, optimizer=False).keys() == logical.keys()


def _trees(rows: tuple[WeightMapping, ...], tensor_parallel: int, ir: popxl.Ir) -> NamedTensors:
    """Variables of a layer as the optimizer's program has them."""
    fwd: dict[str, popxl.Tensor] = {}
    optim: dict[str, popxl.Tensor] = {}
    zeros = {w.name: np.zeros(w.shape, np.float32) for row in rows for w in row.weights}
    for row in rows:
        sharded = row.axis is not None and tensor_parallel > 1
        grouping = ir.replica_grouping(group_size=1) if sharded else None
        data = row.to_variable_data(zeros, tensor_parallel)
        fwd[row.path] = popxl.variable(data, replica_grouping=grouping)
        moment = popxl.variable(data, replica_grouping=grouping)
        optim[f"{row.path}.first_order"] = moment
        optim[f"{row.path}.step"] = popxl.variable(np.float32(0))
    return NamedTensors(fwd=NamedTensors.from_dict(fwd), optim=NamedTensors.from_dict(optim))


def test_the_modules_have_the_rows_variables():
    """Checks the layers that the tests of blocks leave out."""
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.TensorSpec((2, 12, 16), popxl.float32)
        mask = popxl.TensorSpec((2, 12), popxl.int32)
        facts, _ = encoder_block(CONFIG).create_graph(x, mask)
        labels, weight = popxl.TensorSpec((2, 12), popxl.int32), popxl.TensorSpec((), popxl.float32)
        head, _ = t5_head(CONFIG).create_graph(x, labels, weight)
    weight_map = base_weight_map(CONFIG)
    position = {"layer.0.SelfAttention.relative_attention_bias.weight"}
    assert {r.path for r in weight_map.layers["encoder.1"]} == set(facts.keys_flat()) - position
    assert {r.path for r in weight_map.layers[HEAD]} == set(head.keys_flat())
