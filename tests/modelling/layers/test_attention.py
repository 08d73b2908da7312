"""Chunked attention: memory, dropout, and chunks that do not divide the queries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from modelling.layers import Attention, Dropout

BATCH, HEADS, LENGTH, FEATURES = 2, 4, 128, 8


def program(
    attention: Attention, seed: bool = False, **given: np.ndarray
) -> tuple[popxl.Ir, dict[str, Any]]:
    """Attention and its gradients, on random numbers if not `given`; streams and data by name."""
    rng = np.random.default_rng(0)
    shape = (BATCH, HEADS, LENGTH, FEATURES)
    data = {name: rng.standard_normal(shape, np.float32) for name in ("q", "k", "v", "dy")}
    data |= given
    ir = popxl.Ir()
    with ir.main_graph:
        q, k, v, dy = (popxl.variable(x, name=name) for name, x in data.items())
        seeds = [popxl.variable(np.array([1, 2], np.uint32))] if seed else []
        specs = [q.spec, k.spec, v.spec, (), *(s.spec for s in seeds)]
        _, graph = attention.create_graph(*specs)
        gradient = addons.recompute_graph(graph.autodiff(grads_required=graph.graph.inputs[:3]))
        info = graph.call_with_info(q, k, v, *seeds)
        y = info.outputs[0]
        grads = gradient.call(dy, args=gradient.grad_graph_info.inputs_dict(info))
        streams = {
            name: addons.host_store(t)
            for name, t in zip(("y", "dq", "dk", "dv"), (y, *grads), strict=True)
        }
    return ir, {**data, **streams}


def test_slices_save_memory():
    """Scores and their gradient are almost all there is, so twice the slices need about half."""
    used = {}
    for slices in (1, 2, 8):
        ir, _ = program(Attention(Dropout(), num_chunks=slices))
        with popxl.Session(ir, "cpu") as session:
            used[slices] = session.memory_use().temporaries
    scores = BATCH * HEADS * LENGTH * LENGTH * 4
    assert used[1] >= 2 * scores
    assert used[2] < 0.65 * used[1]
    assert used[8] < 0.25 * used[1]


@pytest.mark.parametrize(("fused", "kept"), [
    (True, (BATCH, LENGTH, HEADS, FEATURES)),
    (None, (BATCH, HEADS, LENGTH, FEATURES)),
])  # fmt: skip
def test_what_the_gradient_reads_is_in_the_order_of_its_kernel(fused, kept):
    """cuDNN's attention, which is what fused attention is on GPUs, has heads after tokens."""
    with popxl.Ir().main_graph:
        specs = [popxl.TensorSpec((BATCH, HEADS, LENGTH, FEATURES), popxl.bfloat16)] * 3
        _, graph = Attention(Dropout(), fused=fused).create_graph(*specs)
    written = [op for op in graph.graph._ops if op.defn.name == "materialise"]
    assert [op.outputs[0].shape for op in written] == [kept] * 3


@pytest.mark.parametrize("slices", [1, 4])
def test_dropout_is_the_same_forwards_and_backwards(slices):
    """y is linear in v, so <dy, y> = <dv, v>, but only if both have the same mask."""
    ir, it = program(Attention(Dropout(0.5), num_chunks=slices), seed=True)
    with popxl.Session(ir, "cpu") as session:
        out = session.run()
    forwards = np.sum(it["dy"] * out[it["y"]], dtype=np.float64)
    backwards = np.sum(it["v"] * out[it["dv"]], dtype=np.float64)
    np.testing.assert_allclose(forwards, backwards, rtol=1e-4)


def test_slices_have_masks_of_their_own():
    """With equal scores, and v showing which of the first keys were kept."""
    shown = np.zeros((BATCH, HEADS, LENGTH, FEATURES), np.float32)
    shown[:, :, range(FEATURES), range(FEATURES)] = LENGTH / 2
    ir, it = program(Attention(Dropout(0.5), num_chunks=4), seed=True, q=0 * shown, v=shown)
    with popxl.Session(ir, "cpu") as session:
        y = session.run()[it["y"]]
    np.testing.assert_allclose(np.unique(y), [0, 1], atol=1e-5)
    assert 0.45 < y.mean() < 0.55
    first, *others = np.split(y, 4, axis=2)
    assert all(0.4 < (first != other).mean() < 0.6 for other in others)


def test_chunks_must_divide_the_queries():
    with pytest.raises(ValueError, match="128 queries cannot be split into 3 equal chunks"):
        program(Attention(Dropout(), num_chunks=3))
