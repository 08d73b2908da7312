"""Logits of given tokens against numpy: values and gradients, ids out of range included."""

from __future__ import annotations

import numpy as np

import popxl
import popxl_addons as addons
from modelling.objectives.token_logits import mask_logits, select_logits
from popxl import ops

ROWS = np.arange(3)[:, None]
LOGITS = np.random.default_rng(0).standard_normal((3, 5), np.float32)
IDS = np.asarray([[4, 0, -100], [2, 5, 1], [-1, 3, 9]], np.int32)
VALID = (IDS >= 0) & (IDS < 5)
WEIGHTS = np.random.default_rng(1).standard_normal((3, 5), np.float32)


def run(op, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The result of an op on LOGITS and IDS, and the gradient of its sum times weights."""
    ir = popxl.Ir()
    with ir.main_graph:
        logits, ids = popxl.variable(LOGITS), popxl.variable(IDS, popxl.int32)
        graph = ir.create_graph(op, logits, ids)
        grad = popxl.transforms.autodiff(graph, grads_required=graph.inputs[:1])
        info = ops.call_with_info(graph, logits, ids)
        dy = popxl.constant(weights, popxl.float32)
        (slope,) = ops.call(grad.graph, dy, inputs_dict=grad.inputs_dict(info))
        streams = [addons.host_store(t) for t in (info.outputs[0], slope)]
    with popxl.Session(ir, "cpu") as session:
        found = session.run()
    return found[streams[0]], found[streams[1]]


def test_selected_logits_and_their_gradient() -> None:
    found, slope = run(select_logits, WEIGHTS[:, :3])
    expected = np.where(VALID, LOGITS[ROWS, np.where(VALID, IDS, 0)], 0)
    np.testing.assert_array_equal(found, expected)
    sums = np.zeros_like(LOGITS)
    np.add.at(sums, (np.broadcast_to(ROWS, IDS.shape)[VALID], IDS[VALID]), WEIGHTS[:, :3][VALID])
    np.testing.assert_allclose(slope, sums, rtol=1e-6)


def test_masked_logits_and_their_gradient() -> None:
    found, slope = run(lambda logits, ids: mask_logits(logits, ids, value=-7.0), WEIGHTS)
    masked = np.zeros(LOGITS.shape, bool)
    masked[np.broadcast_to(ROWS, IDS.shape)[VALID], IDS[VALID]] = True
    np.testing.assert_array_equal(found, np.where(masked, -7, LOGITS))
    np.testing.assert_array_equal(slope, np.where(masked, 0, WEIGHTS))
