"""Cross entropy of labels of any shape, against torch."""

import numpy as np
import pytest
import torch

import popxl
import popxl_addons as addons
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
