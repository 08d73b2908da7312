"""Normalisation, convolution, rotary and quantised layers, against torch and Hugging Face."""

import numpy as np
import pytest
import torch
from transformers.models.gptj.modeling_gptj import (
    apply_rotary_pos_emb,
    create_sinusoidal_positions,
)

import popxl
from popxl import ops
from popxl_addons import Module, autodiff
from popxl_addons.layers import Conv2D, GroupNorm
from popxl_addons.layers.layer_norm_distributed import LayerNormDistributed
from popxl_addons.layers.linear_gq import LinearGQ
from popxl_addons.ops.cross_entropy_sharded_wr_loss import cross_entropy_sharded_wr_loss
from popxl_addons.ops.group_quantize_decompress import (
    group_quantize_compress_numpy,
    group_quantize_decompress,
    group_quantize_decompress_numpy,
)
from popxl_addons.ops.layer_norm_distributed import layer_norm_distributed
from popxl_addons.ops.linear_layout import linear_layout
from popxl_addons.ops.rotary_pos_embed import rotary_pos_embed, trig_table_constants, trig_tables
from popxl_addons.ops.static_sparse_ops import dense_const_sparse_matmul, random_sparse
from popxl_addons.testing_utils import TensorInput, run_module
from tests.popxl_addons.helpers import replicas_run, single_run

rng = np.random.default_rng(0)


def test_group_norm():
    layer = torch.nn.GroupNorm(2, 6)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    x = rng.normal(2, 3, size=(2, 6, 4, 3)).astype(np.float32)
    (y,) = run_module(
        GroupNorm(2), TensorInput(x), weights=lambda v: GroupNorm.torch_mapping(v, layer)
    )
    np.testing.assert_allclose(y, layer(torch.tensor(x)).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "ours", "theirs"),
    [
        ((3, 2), {}, {}),
        (
            (3, 2),
            {"paddings": (1, 2, 1, 2), "strides": (2, 1)},
            {"padding": (1, 2), "stride": (2, 1)},
        ),
        (
            (3, 2),
            {"groups": 2, "dilations": (2, 2), "bias": False},
            {"groups": 2, "dilation": 2, "bias": False},
        ),
        (3, {"paddings": "same_upper"}, {"padding": "same"}),
    ],
)
def test_convolution(kernel, ours, theirs):
    layer = torch.nn.Conv2d(4, 6, kernel, **theirs)
    x = rng.normal(size=(2, 4, 7, 8)).astype(np.float32)
    (y,) = run_module(
        Conv2D(6, kernel, **ours), TensorInput(x), weights=lambda v: Conv2D.torch_mapping(v, layer)
    )
    np.testing.assert_allclose(y, layer(torch.tensor(x)).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parts", [2, 4])
def test_layer_norm_over_replicas(parts):
    features = 8
    x, dy = (rng.normal(3, 2, size=(5, features)).astype(np.float32) for _ in range(2))
    w, b = (rng.normal(size=features).astype(np.float32) for _ in range(2))

    def build(x, w, b, dy):
        graph = popxl.gir().create_graph(layer_norm_distributed, x, w, b)
        grad = autodiff(graph)
        info = ops.call_with_info(graph, x, w, b)
        args = grad.grad_graph_info.inputs_dict(info)
        return [info.parent_output(0), *grad.call(dy, args=args)]

    cut = lambda a: np.stack(np.split(a, parts, -1))  # noqa: E731
    feeds = {"x": cut(x), "w": cut(w), "b": cut(b), "dy": cut(dy)}
    got = [np.concatenate(list(a), -1) for a in replicas_run(parts, build, feeds)]
    t = [torch.tensor(a, requires_grad=True) for a in (x, w, b)]
    y = torch.nn.functional.layer_norm(t[0], (features,), t[1], t[2])
    y.backward(torch.tensor(dy))
    for ours, theirs in zip(got, [y.detach(), *(a.grad for a in t)], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_distributed_layer_norm_module():
    def build(x):
        # Each replica has its own part, so the weights' grouping is one replica a group.
        alone = popxl.gir().replica_grouping(group_size=1)
        factories, graph = LayerNormDistributed(alone).create_graph(x)
        return list(graph.bind(factories.init()).call(x))

    x = rng.normal(3, 2, size=(2, 5, 4)).astype(np.float32)
    (y,) = replicas_run(2, build, {"x": x})
    whole = np.concatenate(list(y), -1)
    np.testing.assert_allclose(whole.mean(-1), 0, atol=1e-5)
    np.testing.assert_allclose(whole.std(-1), 1, rtol=1e-3)


# ---- rotary -------------------------------------------------------------------------------------
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rotary_embedding_is_that_of_gpt_j(rotary_dim):
    batch, heads, sequence, size = 2, 3, 5, 8
    x = rng.normal(size=(batch, heads, sequence, size)).astype(np.float32)

    class Rotary(Module):
        def build(self, t):
            sin, cos = trig_table_constants(sequence, rotary_dim)
            return rotary_pos_embed(t, sin, cos, rotary_dim)

    (y,) = run_module(Rotary(), TensorInput(x))
    sin, cos = create_sinusoidal_positions(sequence, rotary_dim).chunk(2, -1)
    t = torch.tensor(x).transpose(1, 2)  # theirs is (batch, sequence, heads, size)
    turned = apply_rotary_pos_emb(t[..., :rotary_dim], sin[None], cos[None])
    wanted = torch.cat([turned, t[..., rotary_dim:]], -1).transpose(1, 2)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


def test_rotation_keeps_lengths_so_its_gradient_turns_back():
    sin, cos = trig_tables(5, 8)
    x = rng.normal(size=(1, 5, 8)).astype(np.float32)

    def build(x):
        tables = popxl.constant(sin), popxl.constant(cos)
        graph = popxl.gir().create_graph(rotary_pos_embed, x, *tables)
        grad = autodiff(graph, grads_required=[graph.inputs[0]])
        info = ops.call_with_info(graph, x, *tables)
        return list(grad.call(info.parent_output(0), args=grad.grad_graph_info.inputs_dict(info)))

    (back,) = replicas_run(1, build, {"x": x})
    np.testing.assert_allclose(back, x[0], rtol=1e-5, atol=1e-6)


def test_tables_must_fit():
    with pytest.raises(ValueError, match="even"):
        trig_tables(5, 7)
    ir = popxl.Ir()
    with ir.main_graph:
        t = popxl.constant(np.zeros((5, 8), np.float32))
        with pytest.raises(ValueError, match=r"\(5, 2\), but got \(5, 4\)"):
            rotary_pos_embed(t, *trig_table_constants(5, 8), rotary_dim=4)


# ---- four bits ----------------------------------------------------------------------------------
@pytest.mark.parametrize(("shape", "size", "dim"), [((8, 12), 4, -1), ((8, 12), 8, 0)])
def test_values_come_back_up_to_half_a_step(shape, size, dim):
    x = rng.normal(size=shape).astype(np.float32)
    packed, scale, bias = group_quantize_compress_numpy(x, size, dim)
    assert packed.dtype == np.uint16
    assert packed.size * 4 == x.size
    back = group_quantize_decompress_numpy(packed, scale, bias, dim)
    assert back.shape == x.shape
    step = np.broadcast_to(scale, (*scale.shape[:-1], size)).reshape(*scale.shape[:-2], -1)
    error = np.moveaxis(np.abs(back - x), dim, -1)
    assert (error <= step / 2 * 1.001).all()
    assert error.max() > 0

    def build():
        tensors = [popxl.constant(a) for a in (packed, scale, bias)]
        return [group_quantize_decompress(*tensors, dim=dim)]

    (on_device,) = single_run(build)
    np.testing.assert_allclose(on_device, back, rtol=1e-6, atol=1e-6)


def test_equal_values_are_exact():
    x = np.full((2, 8), 3.5, np.float16)
    back = group_quantize_decompress_numpy(*group_quantize_compress_numpy(x, 4, -1), -1)
    np.testing.assert_array_equal(back, x)


def test_groups_must_fit():
    with pytest.raises(ValueError, match="multiple of 4"):
        group_quantize_compress_numpy(np.zeros((2, 12)), 6, -1)


@pytest.mark.parametrize("dim", [-1, 0])
def test_quantised_linear(dim):
    layer = torch.nn.Linear(8, 12)
    x = rng.normal(size=(3, 8)).astype(np.float32)
    (y,) = run_module(
        LinearGQ(12, group_size=4, dim=dim),
        TensorInput(x),
        weights=lambda v: LinearGQ.torch_mapping(v, layer, group_size=4, dim=dim),
    )
    weight = layer.weight.detach().numpy().T
    rounded = group_quantize_decompress_numpy(*group_quantize_compress_numpy(weight, 4, dim), dim)
    np.testing.assert_allclose(y, x @ rounded + layer.bias.detach().numpy(), rtol=1e-4, atol=1e-5)


# ---- sparse and layout --------------------------------------------------------------------------
def test_sparse_product():
    sparse = random_sparse(rng.normal(size=(6, 4)).astype(np.float32), density=0.3)
    x = rng.normal(size=(3, 6)).astype(np.float32)
    assert 0 < sparse.nnz < 24

    class Product(Module):
        def build(self, x):
            return dense_const_sparse_matmul(linear_layout(x), sparse, 4)

    (y,) = run_module(Product(), TensorInput(x))
    np.testing.assert_allclose(y, x @ sparse.toarray(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="needs a matrix"):
        run_module(Product(), TensorInput(x[:, :5]))


def test_cross_entropy_over_the_ipus_of_a_replica():
    logits = rng.normal(0, 3, size=(5, 6)).astype(np.float32)
    labels = np.array([0, 5, 3, 2, 1], np.int32)

    def build():
        parts, indices = [], []
        for i in range(2):
            with popxl.ipu(i):
                part = popxl.constant(logits[:, i * 3 : (i + 1) * 3])
                parts.append(ops.identity(part))
                indices.append(ops.identity(popxl.constant(labels - i * 3)))
        return [cross_entropy_sharded_wr_loss(parts, indices)]

    (loss,) = single_run(build)
    wanted = torch.nn.functional.cross_entropy(
        torch.tensor(logits), torch.tensor(labels).long(), reduction="none"
    )
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
