"""Cross entropy of labels of any shape, against torch."""

import numpy as np
import pytest
import torch

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.ops.cross_entropy_sharded_loss import cross_entropy_sharded_loss
from popxl_addons.ops.cross_entropy_sharded_wr_loss import cross_entropy_sharded_wr_loss
from tests.popxl_addons.helpers import replicas_run
from tests.slow import slow

rng = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("shape", "reduction"),
    [
        ((3, 4), "none"), slow((3, 4), "mean"), slow((3, 4), "sum"),
        ((12,), "mean"), slow((12,), "sum"), slow((12,), "none"),
        ((12, 1), "sum"), slow((12, 1), "none"), slow((12, 1), "mean"),
    ],
)  # fmt: skip
def test_labels_are_one_for_each_row_in_any_shape(shape, reduction):
    x = rng.normal(size=(12, 50)).astype(np.float32)
    labels = rng.integers(0, 50, shape).astype(np.int32)

    def build(x, labels):
        return list(addons.cross_entropy_with_grad(x, labels, 8.0, None, reduction))

    loss, dx = replicas_run(1, build, {"x": x[None], "labels": labels[None]})
    t = torch.tensor(x, requires_grad=True)
    wanted = torch.nn.functional.cross_entropy(
        t, torch.tensor(labels).long().flatten(), reduction=reduction
    )
    (gradient,) = torch.autograd.grad(wanted.sum() * 8.0, [t])
    assert loss.shape == (shape if reduction == "none" else ())
    np.testing.assert_allclose(loss, wanted.detach().reshape(loss.shape), rtol=1e-5)
    np.testing.assert_allclose(dx, gradient, rtol=1e-4, atol=1e-6)


def test_labels_of_another_number_are_refused():
    with popxl.Ir().main_graph:
        x = popxl.constant(np.zeros((12, 50), np.float32))
        labels = popxl.constant(np.zeros((3, 5)), popxl.int32)
        with pytest.raises(ValueError, match="one for each row"):
            addons.cross_entropy_with_grad(x, labels)


CLASSES = 5
LOGITS = rng.normal(size=(12, CLASSES)).astype(np.float32)
# Labels of no class, among others; in uint32, -1 is a large number.
LABELS = np.array([4, -1, 0, CLASSES, 2, -100, 3, 2**31 - 1, 1, -(2**31), 2, CLASSES + 1])


def spellings(ignore, reduction):
    """Each way to write the loss of logits: the loss, and its gradient if it returns that too."""
    return {
        "cross_entropy": lambda x, l: addons.cross_entropy(x, l, ignore, reduction),
        "with its gradient": lambda x, l: addons.cross_entropy_with_grad(
            x, l, 1, ignore, reduction
        ),
        "of probabilities": lambda x, l: ops.nll_loss(
            ops.softmax(x, -1), l, ignore, reduction, log_prob=False
        ),
        "sharded over one": lambda x, l: cross_entropy_sharded_loss(
            x, l, ignore, popxl.gir().replica_grouping(group_size=1), reduction
        ),
        "sharded over IPUs": lambda x, l: cross_entropy_sharded_wr_loss(
            [ops.slice(x, 0, 2, axis=1), ops.slice(x, 2, CLASSES, axis=1)],
            [l, l - popxl.constant(2, l.dtype)],
            [0, 0],
        ),
    }


def loss_and_gradient(build, x, labels):
    graph = popxl.gir().create_graph(lambda x, l: build(x, l), x, labels)
    if len(graph.outputs) == 2:
        return list(ops.call(graph, x, labels))
    gradient = popxl.transforms.autodiff(graph, grads_required=graph.inputs[:1])
    call = ops.call_with_info(graph, x, labels)
    ones = popxl.constant(np.ones(graph.outputs[0].shape, np.float32))
    (dx,) = ops.call(gradient.graph, ones, inputs_dict=gradient.inputs_dict(call))
    return [call.outputs[0], dx]


@pytest.mark.parametrize("dtype", [np.int32, slow(np.uint32), slow(np.int8)])
@pytest.mark.parametrize("reduction", ["mean", "none", slow("sum")])
@pytest.mark.parametrize("ignore", [None, 2, slow(-1)])
def test_labels_of_no_class_count_in_no_spelling_of_the_loss(ignore, reduction, dtype):
    """Neither in the loss, nor in the mean, nor in the gradient."""
    with np.errstate(all="ignore"):
        labels = LABELS.astype(dtype)
    x, known = LOGITS.copy(), labels.astype(np.int64)
    known[(known < 0) | (known >= CLASSES) | (known == ignore)] = -100
    x[1] = np.inf, 0, 0, 0, -np.inf  # a row that does not count, whose loss would be no number
    t = torch.tensor(x, requires_grad=True)
    wanted = torch.nn.functional.cross_entropy(t, torch.tensor(known), reduction=reduction)
    (gradient,) = torch.autograd.grad(wanted.sum(), [t])
    others = np.arange(len(x)) != 1  # torch's gradient of that row is no number
    found = spellings(ignore, reduction)
    if ignore is not None or reduction != "none":
        del found["sharded over IPUs"]

    def build(x, labels):
        pairs = (loss_and_gradient(build, x, labels) for build in found.values())
        return [t for pair in pairs for t in pair]

    results = replicas_run(1, build, {"x": x[None], "labels": labels[None]})
    for name, loss, dx in zip(found, results[::2], results[1::2], strict=True):
        np.testing.assert_allclose(loss, wanted.detach(), rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(dx[others], gradient[others], rtol=1e-4, atol=1e-6, err_msg=name)
