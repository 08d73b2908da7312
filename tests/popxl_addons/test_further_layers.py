"""Normalisation, convolution, rotary and quantised layers, against torch and Hugging Face."""

import numpy as np
import pytest
import torch
from ml_dtypes import bfloat16
from scipy.sparse import csr_matrix
from transformers.models.gptj.modeling_gptj import (
    apply_rotary_pos_emb,
    create_sinusoidal_positions,
)

import popxl
from popxl import ops
from popxl_addons import Module, autodiff
from popxl_addons.layers import Conv2D, GroupNorm, LayerNorm
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
from tests.slow import slow

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


@pytest.mark.parametrize("parts", [slow(2), 4])
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


@pytest.mark.parametrize(
    ("replicas", "stride", "parts"),
    [(4, 1, 2), slow(4, 2, 2), slow(8, 1, 4), (8, 4, 2), (2, 1, None)],
)
def test_distributed_layer_norm_is_cut_over_the_group_it_is_given(replicas, stride, parts):
    """The groups are those whose members have the parts of a sample, in any layout."""
    features, variables = 8, {}
    layer = torch.nn.LayerNorm(features)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        group = None if parts is None else ir.replica_grouping(stride=stride, group_size=parts)
        members = [range(replicas)] if group is None else group.groups
        size = features // len(members[0])
        stream = popxl.h2d_stream((3, size), popxl.float32)
        x = ops.host_load(stream)
        factories, graph = LayerNormDistributed(group).create_graph(x)
        variables = factories.init()
        (y,) = graph.bind(variables).call(x)
        out = popxl.d2h_stream(y.shape, y.dtype)
        ops.host_store(out, y)
    samples = rng.normal(3, 2, size=(len(members), 3, features)).astype(np.float32)
    feed = np.zeros((replicas, 3, size), np.float32)
    for sample, replica_group in zip(samples, members, strict=True):
        feed[list(replica_group)] = np.split(sample, len(replica_group), -1)
    with popxl.Session(ir, "cpu") as session:
        for name in ("weight", "bias"):
            whole = getattr(layer, name).detach().numpy()
            session.write_variable_data(variables.get(name), whole.reshape(-1, size))
        found = session.run({stream: feed})[out]
    for sample, replica_group in zip(samples, members, strict=True):
        wanted = layer(torch.tensor(sample)).detach().numpy()
        got = np.concatenate(list(found[list(replica_group)]), -1)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


# ---- rotary -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rotary_dim", "by_sample"),
    [(8, False), (4, True), (None, True), (0, False),
     slow(8, True), slow(4, False), slow(None, False), slow(0, True)],
)  # fmt: skip
def test_rotary_embedding_is_that_of_gpt_j(rotary_dim, by_sample):
    batch, sequence, heads, size = 2, 5, 3, 8
    rotated = rotary_dim or size
    x = rng.normal(size=(batch, sequence, heads, size)).astype(np.float32)
    # Positions of each sample: one after the other, or a sample's own.
    at = np.arange(sequence) + (np.array([[0], [7]]) if by_sample else np.zeros((1, 1), int))
    tables = trig_tables(sequence + 7, rotated)

    class Rotary(Module):
        def build(self, t):
            sin, cos = (popxl.constant(a[at if by_sample else at[0]]) for a in tables)
            return rotary_pos_embed(t, sin, cos, rotary_dim)

    (y,) = run_module(Rotary(), TensorInput(x))
    sin, cos = create_sinusoidal_positions(sequence + 7, rotated)[torch.tensor(at)].chunk(2, -1)
    t = torch.tensor(x)
    turned = apply_rotary_pos_emb(t[..., :rotated], sin, cos)
    wanted = torch.cat([turned, t[..., rotated:]], -1)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_tables_are_computed_in_their_dtype(dtype):
    """As numpy and torch compute them in that dtype, and not in a wider one."""
    sin, cos = trig_tables(2048, 64, np_dtype=dtype)
    assert sin.dtype == cos.dtype == dtype
    assert sin.shape == cos.shape == (2048, 32)
    exponents = np.arange(0, 64, 2, dtype=dtype) / np.array(64, dtype)
    angles = np.arange(2048, dtype=dtype)[:, None] / np.array(10000, dtype) ** exponents
    assert angles.dtype == dtype
    # One rounding of the frequency is left open: x * (1 / f) and x / f.
    tolerance = 2 * np.finfo(dtype).eps * np.abs(angles).astype(np.float64)
    wide = [np.sin(angles.astype(np.float64)), np.cos(angles.astype(np.float64))]
    for found, wanted in zip((sin, cos), wide, strict=True):
        assert (np.abs(found - wanted) <= tolerance + np.finfo(dtype).eps).all()
    if dtype == "float32":
        theirs = create_sinusoidal_positions(2048, 64).numpy()
        tolerance = np.concatenate([tolerance, tolerance], -1) + 1e-7
        assert (np.abs(np.concatenate([sin, cos], -1) - theirs) <= tolerance).all()
        exact = np.sin(np.outer(np.arange(2048.0), 10000.0 ** -(np.arange(0, 64, 2) / 64)))
        assert np.abs(sin - exact).max() > 1e-5


def test_rotation_keeps_lengths_so_its_gradient_turns_back():
    sin, cos = trig_tables(5, 8)
    x = rng.normal(size=(1, 1, 5, 2, 8)).astype(np.float32)

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
        t = popxl.constant(np.zeros((2, 5, 3, 8), np.float32))
        with pytest.raises(ValueError, match=r"\(5, 2\) or \(2, 5, 2\), but got \(5, 4\)"):
            rotary_pos_embed(t, *trig_table_constants(5, 8), rotary_dim=4)
        with pytest.raises(ValueError, match="heads, head size"):
            rotary_pos_embed(t[0], *trig_table_constants(5, 8))


# ---- few bits -----------------------------------------------------------------------------------
def test_the_first_of_four_values_is_in_the_highest_bits():
    packed, scale, bias = group_quantize_compress_numpy(np.array([[0.0, 15, 1, 2, 3, 4, 5, 6]]), 8)
    assert [hex(word) for word in packed[0, 0]] == ["0xf12", "0x3456"]
    assert packed.shape == (1, 1, 2)
    assert (scale.item(), bias.item()) == (1, 0)
    assert packed.dtype == np.uint16
    assert scale.dtype == bias.dtype == np.float16


@pytest.mark.parametrize("last_axis", [True, False])
def test_scale_and_bias_may_lack_their_last_axis(last_axis):
    parts = group_quantize_compress_numpy(rng.normal(size=(6, 8)).astype(np.float32), 4)

    def build():
        words, *others = (popxl.constant(a) for a in parts)
        cut = [t if last_axis else t.reshape(t.shape[:-1]) for t in others]
        return [group_quantize_decompress(words, *cut)]

    (found,) = single_run(build)
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, group_quantize_decompress_numpy(*parts))


def test_the_first_of_two_values_is_in_the_highest_bits():
    packed, scale, bias = group_quantize_compress_numpy(np.array([[0.0, 255, 1, 2]]), 4, bits=8)
    assert [hex(word) for word in packed[0, 0]] == ["0xff", "0x102"]
    assert (scale.item(), bias.item()) == (1, 0)


@pytest.mark.parametrize(
    ("shape", "size", "dim", "bits"),
    [slow((8, 12), 4, -1, 4), ((8, 12), 8, 0, 4), ((8, 12), 6, -1, 8), slow((8, 12), 2, 0, 8)],
)
def test_values_come_back_up_to_half_a_step(shape, size, dim, bits):
    x = rng.normal(size=shape).astype(np.float16).astype(np.float32)
    packed, scale, bias = group_quantize_compress_numpy(x, size, dim, bits)
    assert packed.dtype == np.uint16
    assert packed.nbytes * 8 == x.size * bits
    back = group_quantize_decompress_numpy(packed, scale, bias, dim, bits)
    assert back.shape == x.shape
    assert back.dtype == np.float16
    step = np.broadcast_to(scale, (*scale.shape[:-1], size)).reshape(*scale.shape[:-2], -1)
    error = np.moveaxis(np.abs(back - x), dim, -1)
    # Scale and value are rounded to float16; the scale is used so many times.
    rounding = np.finfo(np.float16).eps / 2 * ((2**bits - 1) * step + 2 * np.abs(x).max())
    assert (error <= step.astype(np.float32) / 2 + rounding).all()
    assert error.max() > 0

    def build():
        tensors = [popxl.constant(a) for a in (packed, scale, bias)]
        return [group_quantize_decompress(*tensors, dim=dim, bits=bits)]

    (on_device,) = single_run(build)
    np.testing.assert_array_equal(on_device, back)


def test_equal_values_are_exact():
    x = np.full((2, 8), 3.5, np.float16)
    back = group_quantize_decompress_numpy(*group_quantize_compress_numpy(x, 4, -1), -1)
    np.testing.assert_array_equal(back, x)


def test_groups_must_fit():
    with pytest.raises(ValueError, match="multiple of 4"):
        group_quantize_compress_numpy(np.zeros((2, 12)), 6, -1)
    with pytest.raises(ValueError, match="4 or 8 bits, not 5"):
        group_quantize_compress_numpy(np.zeros((2, 12)), 6, -1, bits=5)


@pytest.mark.parametrize(
    ("shape", "scale", "dim", "message"),
    [
        ((3, 2), (3, 1), -1, "uint16 of shape"),
        ((3, 2, 1), (3, 3, 1), -1, "need a scale of shape"),
        ((3, 2, 1), (3, 2, 1), 2, "dim must be"),
    ],
)
def test_packed_tensors_must_fit(shape, scale, dim, message):
    with popxl.Ir().main_graph:
        words = popxl.constant(np.zeros(shape, np.uint16))
        half = popxl.constant(np.zeros(scale, np.float16))
        with pytest.raises(ValueError, match=message):
            group_quantize_decompress(words, half, half, dim)


def test_variables_of_a_quantised_linear_have_the_names_of_checkpoints_and_start_as_zeros():
    with popxl.Ir().main_graph:
        for dtype in (popxl.float16, popxl.float32):
            facts, _ = LinearGQ(12, group_size=4).create_graph(popxl.TensorSpec((3, 8), dtype))
            specs = {n: (f.dtype, f.shape) for n, f in facts.to_dict().items()}
            assert specs == {
                "weight_compressed": (popxl.uint16, (8, 3, 1)),
                "weight_decompression_scale": (dtype, (8, 3, 1)),
                "weight_decompression_bias": (dtype, (8, 3, 1)),
                "bias": (dtype, (12,)),
            }
            assert not any(f.next_data().any() for f in facts.values_flat())


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        *(([0.0, 1.0, value, 2.0], np.float16) for value in (np.nan, np.inf, 1e5)),
        ([-4e4, 0.0, 1.0, 4e4], np.float16),  # 8e4 apart
        ([0.0, 1.0, 2.0, 65504.0], np.float16),  # 15 rounded steps are more
        *(([0.0, 1.0, value, 2.0], bfloat16) for value in (np.nan, -np.inf, 1e39)),
        ([-3e38, 0.0, 1.0, 3e38], bfloat16),
    ],
)
def test_what_a_scale_cannot_hold_has_no_4_bit_form(values, dtype):
    with pytest.raises(ValueError, match="4-bit form"):
        group_quantize_compress_numpy(np.array([values]), 4, dtype=dtype)


def test_norms_over_several_axes_and_biases_of_convolutions_are_mapped():
    norm, conv = torch.nn.LayerNorm((2, 3)), torch.nn.Conv2d(2, 4, 1)
    with popxl.Ir().main_graph:
        flat = LayerNorm().create_graph(popxl.TensorSpec((5, 6), popxl.float32))[0].init("n")
        ours = Conv2D(4, 1).create_graph(popxl.TensorSpec((1, 2, 3, 3), popxl.float32))[0].init("c")
    assert LayerNorm.torch_mapping(flat, norm)[flat.weight].shape == (6,)
    assert ours.bias.shape == (1, 4, 1, 1)
    bias = Conv2D.torch_mapping(ours, conv)[ours.bias]
    np.testing.assert_array_equal(bias.ravel(), conv.bias.detach())


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
    words, scale, low = group_quantize_compress_numpy(weight, 4, dim)

    def everywhere(words, factor, offset):
        return group_quantize_decompress_numpy(words, factor, offset, dim).astype(np.float32)

    levels = everywhere(words, np.ones_like(scale), np.zeros_like(low))
    kept = levels * everywhere(words * 0, low, scale) + everywhere(words * 0, scale, low)
    wanted = x @ kept + layer.bias.detach().numpy()
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)


# ---- sparse and layout --------------------------------------------------------------------------
def test_sparse_product():
    dense = rng.normal(size=(6, 4))
    before = dense.copy()
    assert random_sparse(dense, density=0.3) is dense
    assert np.array_equal(dense, np.where(dense == 0, 0, before))
    sparse = csr_matrix(dense)
    x = rng.normal(size=(3, 6)).astype(np.float32)
    assert 0 < sparse.nnz < 24

    class Product(Module):
        def build(self, x):
            return dense_const_sparse_matmul(linear_layout(x), sparse, 4)

    (y,) = run_module(Product(), TensorInput(x))
    np.testing.assert_allclose(y, x @ sparse.toarray(), rtol=1e-5, atol=1e-6)
    (y,) = run_module(Product(), TensorInput(x.astype(np.float16)))
    np.testing.assert_allclose(y, x @ sparse.toarray(), rtol=1e-2, atol=1e-2)
    with pytest.raises(RuntimeError, match="takes float16 and float32"):
        run_module(Product(), TensorInput(x.astype(np.int32)))
    assert np.count_nonzero(random_sparse(np.ones((5, 5)), density=0.0)) == 1
    with pytest.raises(ValueError, match="needs a matrix"):
        run_module(Product(), TensorInput(x[:, :5]))


def test_cross_entropy_over_the_ipus_of_a_replica():
    logits = rng.normal(0, 3, size=(5, 6)).astype(np.float32)  # a loss is their difference
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
    np.testing.assert_allclose(loss, wanted, rtol=1e-5, atol=np.spacing(np.abs(logits).max()))
