"""Attention to a sample's own texts, and in groups of heads: what GPUs compute by cuDNN's kernel.

On a CPU it compares the loop over tiles; with `-p tests.on_gpu`, the kernel.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import popxl
from popxl import ops
from popxl.ops import _attention_math, _cudnn_attention
from popxl.transforms import autodiff
from tests.popxl.ops.cudnn_stand_in import use_stand_in
from tests.popxl.ops.harness import compile_quickly, evaluate, rand
from tests.slow import slow

HEADS, KEYS, TOKENS = 4, 2, 192  # heads of queries, and of keys
TEXTS = [[50, 1, 30, 60, 51], [192]]


def segments() -> np.ndarray:
    numbers = [np.repeat(np.arange(len(lengths)), lengths) for lengths in TEXTS]
    return np.array(numbers, np.int32)


def attend(window: int | None, in_order: bool, *inputs: popxl.Tensor) -> popxl.Tensor:
    q, k, v, numbers = inputs
    places = popxl.constant(np.arange(TOKENS)[None], popxl.int32)
    return ops.attention(
        q, k, v, (), 0.25,
        causal=True, window=window, positions=None if in_order else (places, places),
        segments=(numbers, numbers), fused=True,
    )  # fmt: skip


def with_gradients(window: int | None, in_order: bool, *inputs: popxl.Tensor) -> list[popxl.Tensor]:
    *arguments, dy = inputs
    graph = popxl.gir().create_graph(partial(attend, window, in_order), *arguments)
    gradient = autodiff(graph, grads_required=graph.inputs[:3])
    call = ops.call_with_info(graph, *arguments)
    return [
        call.outputs[0],
        *ops.call(gradient.graph, dy, inputs_dict=gradient.inputs_dict(call)),
    ]


def expected(window: int | None, *arrays: np.ndarray) -> list[torch.Tensor]:
    q, k, v, dy = (torch.tensor(a.astype(np.float64), requires_grad=True) for a in arrays)
    numbers, places = torch.tensor(segments()), torch.arange(TOKENS)
    back = places[:, None] - places
    seen = (back >= 0) & (back < (window or TOKENS))
    seen = (seen & (numbers[:, :, None] == numbers[:, None, :]))[:, None]
    k2, v2 = (t.repeat_interleave(HEADS // KEYS, 1) for t in (k, v))
    weights = torch.softmax((q @ k2.mT * 0.25).masked_fill(~seen, -torch.inf), -1)
    y = weights @ v2
    return [y, *torch.autograd.grad(y, (q, k, v), dy)]


@pytest.mark.parametrize(
    ("in_order", "window", "workspace"),
    [
        (True, 40, 2**32),
        slow(False, 40, 2**32),
        slow(True, None, 2**17),  # on a CPU as with more room
        slow(False, None, 2**17),
    ],
)
def test_texts_attend_to_themselves(
    in_order: bool, window: int | None, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_quickly()
    monkeypatch.setattr(_cudnn_attention, "MAX_WORKSPACE", workspace)
    q, dy = rand(2, HEADS, TOKENS, 64), rand(2, HEADS, TOKENS, 64, seed=3)
    k, v = rand(2, KEYS, TOKENS, 64, seed=1), rand(2, KEYS, TOKENS, 64, seed=2)
    half = [a.astype(popxl.bfloat16.as_numpy()) for a in (q, k, v, dy)]
    found = evaluate(partial(with_gradients, window, in_order), *half[:3], segments(), half[3])
    for ours, theirs in zip(found, expected(window, *half), strict=True):
        # bfloat16 has 8 bits: the largest numbers are off by 2^-8, sums of rounded ones by more.
        close = 0.02 * float(theirs.detach().abs().max())
        np.testing.assert_allclose(ours.astype(np.float64), theirs.detach(), rtol=0, atol=close)


@pytest.mark.parametrize(
    ("keeps_statistics", "in_group"),
    [(True, 3), (False, 1), slow(True, 1), slow(False, 3)],
)
def test_groups_of_heads_give_what_all_together_give(
    keeps_statistics: bool, in_group: int, monkeypatch: pytest.MonkeyPatch
):
    """Three heads share keys; one alone takes a third of those that do."""
    use_stand_in(monkeypatch, keeps_statistics)
    biases = rand(1, 6, 10, 10, seed=4), rand(6, 10, 10, seed=5), rand(10, 10, seed=6)
    dy, q = rand(2, 10, 6, 8, seed=0), rand(2, 6, 10, 8, seed=1)
    k, v = (rand(2, 2, 10, 8, seed=n) for n in (7, 8))
    segments = np.array([[0] * 4 + [1] * 6] * 2, np.int32)
    arrays = [np.float32(a) for a in (dy, q, k, v, *biases)]
    settings = _attention_math.AttentionAttrs(0.3, 3, 0.0, True, (4, 0), None, False, True, False)

    def run(dy: jax.Array, *given: jax.Array) -> tuple[jax.Array, ...]:
        y, statistics = _cudnn_attention.attention_kernel(*given, settings=settings)
        kept = *given[:3], y, statistics, *given[3:]
        return y, *_cudnn_attention.attention_grads_kernel(dy, *kept, settings=settings)

    def both(heads: int) -> tuple[jax.Array, ...]:
        monkeypatch.setattr(_cudnn_attention, "MAX_WORKSPACE", heads * 2 * 2 * 10 * 10)
        return jax.jit(lambda *given: run(*given))(*arrays, segments, segments)

    whole, grouped = both(6), both(in_group)
    for found, expected in zip(grouped, whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("biases", "causal", "window"),
    [
        (0, True, None),
        (1, True, (2, 0)),
        (1, False, (2, 1)),
        slow(1, True, None),
        slow(0, True, (2, 0)),
        slow(0, False, (2, 1)),
    ],
)
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize(("positions", "segments"), [(True, True), (False, True), (False, False)])
def test_what_is_hidden_is_what_the_definition_hides(
    positions: bool,
    segments: bool,
    lengths: bool,
    causal: bool,
    window: tuple[int, int] | None,
    biases: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All keys of some queries, too."""
    use_stand_in(monkeypatch)
    settings = _attention_math.AttentionAttrs(
        0.3, biases, 0.0, causal, window, None, positions, segments, lengths
    )
    q, k, v = (np.float32(rand(2, 4, 10, 8, seed=n)) for n in range(3))
    places = np.array([[5, 4, 3, 2, 1, 0, 6, 7, 8, 9]], np.int32)
    texts = [np.array([[0] * 4 + [n] * 6, [0] * 10], np.int32) for n in (1, 2)]
    bias = np.float32(rand(4, 10, 10, seed=4))
    bias[0, 3:5], bias[1, :5, 0], bias[2, :, 1] = -np.inf, np.finfo(np.float32).min, -1e9
    rest = [bias] * biases + [places] * 2 * positions + texts * segments
    rest += [np.array([5, 0], np.int32)] * lengths
    expected = _attention_math.attention_with_weights(q, k, v, *rest, settings=settings)[0]
    arrays = [jnp.asarray(a) for a in (q, k, v, *rest)]
    found = _cudnn_attention.attention_kernel(*arrays, settings=settings)[0]
    np.testing.assert_allclose(found.swapaxes(1, 2), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "keys", "room", "groups"),
    [
        (8, 8, 8, 1),
        (8, 8, 7, 2),
        (8, 2, 3, 4),  # half of what shares keys
        (6, 2, 3, 2),
        (6, 2, 2, 6),  # two of the three that share keys would leave one
        (6, 3, 4, 3),  # three would share one with the next group
        (5, 5, 0, 5),
    ],
)
def test_heads_go_in_groups_that_fit(
    heads: int, keys: int, room: int, groups: int, monkeypatch: pytest.MonkeyPatch
):
    q = (1, heads, 128, 64)
    one = 2 * 128 * 128
    monkeypatch.setattr(_cudnn_attention, "MAX_WORKSPACE", room * one)
    assert _cudnn_attention._num_head_groups(q, 128, keys) == groups
    size = heads // groups
    shapes = [q, q, (1, keys, 128, 64), (1, keys, 128, 64), q]
    assert _cudnn_attention.workspace_bytes(_cudnn_attention.BACKWARD, shapes) == size * one
    assert _cudnn_attention.workspace_bytes(_cudnn_attention.FORWARD, shapes[1:4]) == 0
