"""Loops over chunks of tokens: a loss and its gradients, against NumPy in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from modelling.layers.chunk_loop import ChunkLoop, LossChunkLoop
from popxl import Tensor, ops
from popxl_addons.ops.cross_entropy import cross_entropy

TOKENS, HIDDEN, VOCABULARY = 12, 5, 7
SCALE = 256.0
"""Gradient of the loss, as loss scaling sets it."""


def chunk_loss(inputs: Sequence[Tensor], seed: Tensor | None) -> Tensor:
    """Sum of the cross-entropies of a chunk of tokens."""
    x, weight, labels = inputs
    logits = ops.cast(x @ weight, popxl.float32)
    return cross_entropy(logits.reshape((-1, VOCABULARY)), labels.reshape((-1,)), None, "sum")


def run(loop: ChunkLoop, dtype: Any) -> tuple[popxl.Ir, dict[str, np.ndarray]]:
    """Returns the program, and loss and gradients as it computes them."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((2, TOKENS, HIDDEN)), rng.standard_normal((HIDDEN, VOCABULARY))
    labels = rng.integers(0, VOCABULARY, (2, TOKENS)).astype(np.int32)
    ir = popxl.Ir()
    with ir.main_graph:
        floats = [popxl.variable(value, dtype) for value in (x, weight)]
        inputs = [*floats, popxl.variable(labels, popxl.int32)]
        _, graph = loop.create_graph([t.spec for t in inputs])
        gradient = graph.autodiff(grads_required=graph.graph.inputs[:2])
        info = graph.call_with_info(*inputs)
        dy = popxl.constant(SCALE, popxl.float32)
        grads = gradient.call(dy, args=gradient.grad_graph_info.inputs_dict(info))
        streams = [addons.host_store(t) for t in (info.outputs[0], *grads)]
    with popxl.Session(ir, "cpu") as session:
        results = session.run()
    return ir, {name: results[s] for name, s in zip(("loss", "dx", "dw"), streams, strict=True)}


def expected() -> dict[str, np.ndarray]:
    """Loss and gradients in float64."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((2, TOKENS, HIDDEN)), rng.standard_normal((HIDDEN, VOCABULARY))
    labels = rng.integers(0, VOCABULARY, (2, TOKENS))
    logits = x @ weight
    exps = np.exp(logits - logits.max(-1, keepdims=True))
    probs, onehot = exps / exps.sum(-1, keepdims=True), np.eye(VOCABULARY)[labels]
    dlogits = SCALE * (probs - onehot)
    return {
        "loss": -np.log((probs * onehot).sum(-1)).sum(),
        "dx": dlogits @ weight.T,
        "dw": np.einsum("bth,btv->hv", x, dlogits),
    }


@pytest.mark.parametrize("dtype", [popxl.float32, popxl.bfloat16, popxl.float16])
@pytest.mark.parametrize("num_chunks", [1, 3, 12])
def test_a_loss_and_its_gradients_equal_those_of_the_whole(num_chunks: int, dtype: Any) -> None:
    _, results = run(LossChunkLoop(chunk_loss, num_chunks, (1, None, 1), 2), dtype)
    tolerance = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}[dtype.name]
    for name, value in expected().items():
        error = np.abs(np.asarray(results[name], np.float64) - value).max()
        assert error < tolerance * np.abs(value).max(), name


def test_a_loss_loop_multiplies_three_times_and_a_recomputing_loop_four() -> None:
    """Logits, and the gradients of features and weight; the other loop has the logits twice."""
    axes = (1, None, 1)
    loops = LossChunkLoop(chunk_loss, 3, axes, 2), ChunkLoop(chunk_loss, 3, axes, 2, out_axis=None)
    assert [num_matmuls(run(loop, popxl.float32)[0]) for loop in loops] == [3, 4]


def num_matmuls(ir: popxl.Ir) -> int:
    """Returns the number of matmuls that XLA compiles."""
    with popxl.Session(ir, "cpu") as session:
        texts = [e.as_text() for e in session._program.executables.values()]
    return sum(text.count(" dot(") for text in texts)
