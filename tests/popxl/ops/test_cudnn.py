"""Attention to a sample's own texts, and in groups of heads: what GPUs compute by cuDNN's kernel.

On a CPU it compares the loop over tiles; with `-p tests.on_gpu`, the kernel.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import popxl
from popxl import ops
from popxl.ops import _cudnn
from popxl.ops._folds import tracing_for
from popxl.transforms import autodiff
from tests.popxl.ops.harness import compile_quickly, evaluate, rand
from tests.slow import slow

HEADS, KEYS, TOKENS = 4, 2, 192  # heads of queries, and of keys
TEXTS = [[50, 1, 30, 60, 51], [192]]
STRETCHES = 8


def segments() -> np.ndarray:
    numbers = [np.repeat(np.arange(len(lengths)), lengths) for lengths in TEXTS]
    return np.array(numbers, np.int32)


def attend(window: int | None, told: bool, *inputs: popxl.Tensor) -> popxl.Tensor:
    q, k, v, numbers = inputs
    return ops.attention(
        q, k, v, (), 0.25,
        causal=True, window=window, segments=(numbers, numbers), fused=True,
        stretches=STRETCHES if told else None,
    )  # fmt: skip


def with_gradients(window: int | None, told: bool, *inputs: popxl.Tensor) -> list[popxl.Tensor]:
    *arguments, dy = inputs
    graph = popxl.gir().create_graph(partial(attend, window, told), *arguments)
    gradient = autodiff(graph, grads_required=graph.inputs[:3])
    call = ops.call_with_info(graph, *arguments)
    return [
        *call.outputs,
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
    ("told", "window", "skipped", "workspace"),
    [
        (True, 40, STRETCHES, 2**32),
        slow(True, None, STRETCHES, 2**32),  # on a CPU the same as the first
        slow(True, None, STRETCHES, 2**17),
        slow(True, 40, 0, 2**32),
        slow(True, None, 0, 2**17),
        slow(False, 40, 0, 2**32),
        slow(False, None, 0, 2**17),
    ],
)
def test_texts_attend_to_themselves(
    told: bool,
    window: int | None,
    skipped: int,
    workspace: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Args: `skipped`: most stretches that the kernel is told of, rather than given a mask."""
    compile_quickly()
    monkeypatch.setattr(_cudnn, "MAX_WORKSPACE", workspace)
    monkeypatch.setattr(_cudnn, "MAX_STRETCHES", skipped)
    q, dy = rand(2, HEADS, TOKENS, 64), rand(2, HEADS, TOKENS, 64, seed=3)
    k, v = rand(2, KEYS, TOKENS, 64, seed=1), rand(2, KEYS, TOKENS, 64, seed=2)
    half = [a.astype(popxl.bfloat16.as_numpy()) for a in (q, k, v, dy)]
    found = evaluate(partial(with_gradients, window, told), *half[:3], segments(), half[3])
    for ours, theirs in zip(found, expected(window, *half), strict=True):
        # bfloat16 has 8 bits: the largest numbers are off by 2^-8, sums of rounded ones by more.
        close = 0.02 * float(theirs.detach().abs().max())
        np.testing.assert_allclose(ours.astype(np.float64), theirs.detach(), rtol=0, atol=close)


def test_stretches_are_where_segments_change():
    starts, lengths = (np.asarray(a) for a in _cudnn.stretches_of(segments(), STRETCHES))
    np.testing.assert_array_equal(lengths[0], [*TEXTS[0], -1, -1, -1])
    np.testing.assert_array_equal(starts[0], [0, 50, 51, 81, 141, -1, -1, -1])
    np.testing.assert_array_equal((starts[1], lengths[1]), ([0] + [-1] * 7, [192] + [-1] * 7))


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
    monkeypatch.setattr(_cudnn, "MAX_WORKSPACE", room * one)
    assert _cudnn._groups(q, 128, keys, 1) == groups
    size = heads // groups
    shapes = [q, q, (1, keys, 128, 64), (1, keys, 128, 64), q]
    assert _cudnn.workspace_of(_cudnn.BACKWARD, shapes) == size * one
    assert _cudnn.workspace_of(_cudnn.FORWARD, shapes[1:4]) == 0


@pytest.mark.parametrize(("target", "skips"), [("gpu 8.9", False), ("gpu 9.0", True)])
def test_hopper_alone_is_told_of_stretches(target: str, skips: bool):
    q = np.zeros((1, 2, 128, 64))
    settings = _cudnn.Settings(1.0, 0, 0.0, True, None, None, True, True, False, False, 4)
    with tracing_for(target):
        assert _cudnn.skips_segments(q, settings) == skips
        assert not _cudnn.skips_segments(q, settings._replace(stretches=0))
        assert not _cudnn.skips_segments(np.zeros((1, 2, 2**15, 64)), settings)  # 8 GB a head
