"""Tensor-parallel collectives and the loss over a sharded vocabulary, against torch."""

from functools import partial

import numpy as np
import pytest
import torch

import popxl
from popxl import ops
from popxl.errors import popart_exception
from popxl_addons import autodiff
from popxl_addons.ops.cross_entropy_sharded_loss import cross_entropy_sharded_loss
from popxl_addons.ops.grad_reduce_square_add import grad_reduce_square_add
from popxl_addons.ops.replicated_all_reduce_TP import (
    replicated_all_reduce,
    replicated_all_reduce_identical_grad_inputs,
    replicated_all_reduce_identical_inputs,
)
from popxl_addons.patterns import apply_pre_alias_patterns
from tests.popxl_addons.helpers import replicas_run
from tests.slow import slow

rng = np.random.default_rng(0)
X = rng.normal(size=(4, 3)).astype(np.float32)
DY = rng.normal(size=(4, 3)).astype(np.float32)


def forward_and_gradient(op, kind="add"):
    """Value and gradient of a collective among pairs of 4 replicas."""

    def build(x, dy):
        pairs = popxl.gir().replica_grouping(group_size=2)
        graph = popxl.gir().create_graph(lambda t: op(t, kind, pairs), x)
        grad = autodiff(graph)
        (y,) = ops.call(graph, x)
        return [y, *grad.call(dy)]

    return replicas_run(4, build, {"x": X, "dy": DY})


def summed(a):
    pairs = a.reshape(2, 2, 3).sum(1, keepdims=True)
    return np.broadcast_to(pairs, (2, 2, 3)).reshape(4, 3)


@pytest.mark.parametrize(
    ("op", "value", "gradient"),
    [
        (replicated_all_reduce, summed(X), summed(DY)),
        (replicated_all_reduce_identical_inputs, X, summed(DY)),
        (replicated_all_reduce_identical_grad_inputs, summed(X), DY),
    ],
    ids=["all_reduce", "identical_inputs", "identical_grad_inputs"],
)
def test_collectives_and_their_gradients(op, value, gradient):
    y, dx = forward_and_gradient(op)
    np.testing.assert_allclose(y, value, rtol=1e-6)
    np.testing.assert_allclose(dx, gradient, rtol=1e-6)


def test_reductions_may_be_means():
    y, dx = forward_and_gradient(replicated_all_reduce_identical_inputs, "mean")
    np.testing.assert_array_equal(y, X)
    np.testing.assert_allclose(dx, summed(DY) / 2, rtol=1e-6)
    with pytest.raises(ValueError, match="'add' or 'mean'"):
        forward_and_gradient(replicated_all_reduce_identical_inputs, "max")


def test_a_session_asks_for_the_patterns():
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        x = popxl.constant(np.ones(2, np.float32))
        replicated_all_reduce_identical_inputs(x)
    with pytest.raises(popart_exception, match="apply_pre_alias_patterns"):
        popxl.Session(ir)
    with pytest.raises(ValueError, match="unknown level"):
        apply_pre_alias_patterns(ir, "some")
    apply_pre_alias_patterns(ir, level="default")
    popxl.Session(ir)


# ---- a tensor-parallel layer --------------------------------------------------------------------
@pytest.mark.parametrize("tp", [2, slow(4)])
def test_a_layer_between_the_collectives_is_the_whole_layer(tp):
    """Column-parallel, then row-parallel: the gradient of x is complete on each replica."""
    x, w1, w2, dy = (
        rng.normal(size=s).astype(np.float32) for s in [(2, 3), (3, 8), (8, 5), (2, 5)]
    )

    def build(x, w1, w2, dy):
        def layer(x, w1, w2):
            x = replicated_all_reduce_identical_inputs(x)
            return replicated_all_reduce_identical_grad_inputs(ops.tanh(x @ w1) @ w2)

        graph = popxl.gir().create_graph(layer, x, w1, w2)
        grad = autodiff(graph)
        info = ops.call_with_info(graph, x, w1, w2)
        return list(grad.call(dy, args=grad.grad_graph_info.inputs_dict(info)))

    same = lambda a: np.repeat(a[None], tp, 0)  # noqa: E731
    dx, dw1, dw2 = replicas_run(
        tp,
        build,
        {"x": same(x), "w1": np.stack(np.split(w1, tp, 1)), "w2": np.stack(np.split(w2, tp, 0)),
         "dy": same(dy)},
    )  # fmt: skip
    t = [torch.tensor(a, requires_grad=True) for a in (x, w1, w2)]
    (torch.tanh(t[0] @ t[1]) @ t[2]).backward(torch.tensor(dy))
    for replica in range(tp):
        np.testing.assert_allclose(dx[replica], t[0].grad, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.concatenate(list(dw1), 1), t[1].grad, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.concatenate(list(dw2), 0), t[2].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("group_size", [2, slow(4)])
def test_a_loop_of_such_layers_has_the_gradient_of_its_unrolled_calls(group_size):
    x, w1, w2, dy = (rng.normal(size=(4, 3, 3)).astype(np.float32) for _ in range(4))

    def build(unroll, x, w1, w2, dy):
        group = popxl.gir().replica_grouping(group_size=group_size)

        def layer(x, w1, w2):
            y = replicated_all_reduce_identical_inputs(x, group=group)
            y = replicated_all_reduce_identical_grad_inputs(ops.tanh(y @ w1) @ w2, group=group)
            return x + y + replicated_all_reduce(ops.sin(x), group=group)

        step = popxl.gir().create_graph(layer, x, w1, w2)

        def layers(x, w1, w2):
            if not unroll:
                return ops.repeat(step, 3, x, w1, w2)
            for _ in range(3):
                (x,) = ops.call(step, x, w1, w2)
            return x

        graph = popxl.gir().create_graph(layers, x, w1, w2)
        grad = autodiff(graph)
        info = ops.call_with_info(graph, x, w1, w2)
        return list(grad.call(dy, args=grad.grad_graph_info.inputs_dict(info)))

    x = np.repeat(x[::group_size], group_size, 0)  # equal on the replicas of a group
    dy = np.repeat(dy[::group_size], group_size, 0)
    data = {"x": x, "w1": w1, "w2": w2, "dy": dy}
    looped, unrolled = (replicas_run(4, partial(build, unroll), data) for unroll in (False, True))
    for a, b in zip(looped, unrolled, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


# ---- cross entropy ------------------------------------------------------------------------------
N, VOCABULARY = 6, 8
LOGITS = rng.normal(0, 4, size=(N, VOCABULARY)).astype(np.float32)
LABELS = np.array([0, 7, 3, 3, 5, 1])


def sharded_loss(tp, reduction, ignore=None, logits=LOGITS, dtype=np.float32, labels=LABELS):
    """Loss and gradient with the vocabulary over pairs or all of 4 replicas."""
    size = VOCABULARY // tp
    places = np.arange(4) % tp
    parts = np.stack([logits[:, p * size : (p + 1) * size] for p in places]).astype(dtype)
    local = (labels[None] - places[:, None] * size).astype(np.int32)
    ignored = None if ignore is None else (ignore - places * size).astype(np.int32)

    def build(logits, labels, ignored=None):
        group = popxl.gir().replica_grouping(group_size=tp)

        def loss(*args):
            return cross_entropy_sharded_loss(*args, replica_grouping=group, reduction=reduction)

        inputs = [logits, labels] if ignored is None else [logits, labels, ignored]
        graph = popxl.gir().create_graph(loss, *inputs)
        (loss_tensor,) = graph.outputs
        ones = popxl.constant(np.ones(loss_tensor.shape), logits.dtype)
        grad = autodiff(graph, grads_required=[graph.inputs[0]])
        info = ops.call_with_info(graph, *inputs)
        (dx,) = grad.call(ones, args=grad.grad_graph_info.inputs_dict(info))
        return [info.parent_output(0), dx]

    feeds = {"logits": parts, "labels": local}
    if ignored is not None:
        feeds["ignored"] = ignored
    loss, dx = replicas_run(4, build, feeds)
    return loss, np.concatenate(list(dx[:tp]), axis=-1)


def torch_loss(reduction, ignore=-100, logits=LOGITS, labels=LABELS):
    t = torch.tensor(logits, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(
        t, torch.tensor(labels), reduction=reduction, ignore_index=ignore
    )
    loss.backward(torch.ones_like(loss))
    return loss.detach().numpy(), t.grad.numpy()


@pytest.mark.parametrize(
    ("tp", "reduction"),
    [
        (1, "none"), slow(1, "mean"), slow(1, "sum"),
        (2, "mean"), slow(2, "sum"), slow(2, "none"),
        (4, "sum"), slow(4, "mean"), slow(4, "none"),
    ],
)  # fmt: skip
def test_loss_over_a_sharded_vocabulary(tp, reduction):
    loss, dx = sharded_loss(tp, reduction)
    wanted, gradient = torch_loss(reduction)
    for replica in range(4):
        np.testing.assert_allclose(loss[replica], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dx, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", slow("sum")])
def test_ignored_labels_do_not_count(reduction):
    loss, dx = sharded_loss(2, reduction, ignore=3)
    wanted, gradient = torch_loss(reduction, ignore=3)
    np.testing.assert_allclose(loss[0], wanted, rtol=1e-5)
    np.testing.assert_allclose(dx, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("tp", "reduction"), [(2, "mean"), slow(1, "mean"), slow(4, "none")])
def test_labels_of_no_part_do_not_count(tp, reduction):
    wrong = np.array([0, -1, 3, VOCABULARY, 5, -100])
    loss, dx = sharded_loss(tp, reduction, labels=wrong)
    ignored = np.where((wrong >= 0) & (wrong < VOCABULARY), wrong, -100)
    wanted, gradient = torch_loss(reduction, labels=ignored)
    np.testing.assert_allclose(loss[0], wanted, rtol=1e-5)
    np.testing.assert_allclose(dx, gradient, rtol=1e-4, atol=1e-6)


def test_half_logits_give_a_loss_computed_in_float32():
    big = (LOGITS * 10).astype(np.float16).astype(np.float32)
    loss, dx = sharded_loss(4, "mean", logits=big, dtype=np.float16)
    wanted, gradient = torch_loss("mean", logits=big)
    assert loss.dtype == np.float16
    np.testing.assert_allclose(loss[0], wanted, rtol=1e-3)
    np.testing.assert_allclose(dx, gradient, rtol=1e-2, atol=1e-4)


def test_the_gradient_of_the_loss_does_not_communicate():
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        specs = popxl.TensorSpec((4, 3), popxl.float32), popxl.TensorSpec((4,), popxl.int32)
        graph = ir.create_graph(cross_entropy_sharded_loss, *specs)
        grad = autodiff(graph, grads_required=[graph.inputs[0]])
    collective = [op for op in grad.graph.ops if "collective" in op.defn.tags]
    assert collective == []
    assert any("collective" in op.defn.tags for op in graph.ops)


def test_arguments_of_the_loss_are_checked():
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        logits, labels = (popxl.constant(np.zeros(s), d) for s, d in
                          [((4, 3), popxl.float32), ((5,), popxl.int32)])  # fmt: skip
        with pytest.raises(ValueError, match=r"\(4, 3\) and \(5,\)"):
            cross_entropy_sharded_loss(logits, labels)
        with pytest.raises(ValueError, match="unknown reduction"):
            cross_entropy_sharded_loss(logits, labels[:4], reduction="max")


# ---- norm ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("as_tensor", [False, True])
def test_squares_of_half_gradients_do_not_overflow(as_tensor):
    def build(g):
        scaling = popxl.constant(128.0, popxl.float16) if as_tensor else 128
        return [grad_reduce_square_add(g, scaling)]

    g = (rng.normal(size=(1, 50)) * 5000).astype(np.float16)
    (square,) = replicas_run(1, build, {"g": g})
    np.testing.assert_allclose(square, np.sum((g.astype(np.float64) / 128) ** 2), rtol=1e-5)
