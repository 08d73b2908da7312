"""Gradients through tensors that are changed through views, beside PyTorch without views."""

from __future__ import annotations

import pytest
import torch

import popxl
from popxl import ops
from tests.popxl.ops.harness import OpRecord, cases_of, check, rand, run_cases

X, Y, ROW = rand(3, 4), rand(3, 4, seed=1), rand(1, 4, seed=2)


def _put(x: torch.Tensor, at: object, value: torch.Tensor) -> torch.Tensor:
    copy = x.clone()
    copy[at] = value
    return copy


def _slice(x, r):
    owner = x * 2.0
    view = ops.slice_(owner, 1, 2)
    view += r
    return owner * owner, owner * view


def _slice_reference(x, r):
    owner = _put(2 * x, slice(1, 2), 2 * x[1:2] + r)
    return owner * owner, owner * owner[1:2]


def _view_of_view(x, y):
    owner = x * 2.0
    rows = ops.slice_(owner, 1, 3)
    row = ops.slice_(rows, 0, 1)
    ops.scaled_add_(row, ops.slice(y, 0, 1), a=0.5, b=2.0)
    return owner * y, rows * rows, row


def _view_of_view_reference(x, y):
    owner = _put(2 * x, slice(1, 2), x[1:2] + 2 * y[0:1])
    return owner * y, owner[1:3] ** 2, owner[1:2]


def _flattened_slice(x, r):
    owner = x * 3.0
    ops.add_(ops.slice_(owner.flatten_(), 2, 6), r.reshape((4,)))
    return ops.exp(owner)


def _flattened_slice_reference(x, r):
    flat = (3 * x).flatten()
    return torch.exp(_put(flat, slice(2, 6), flat[2:6] + r[0])).reshape(3, 4)


def _transposed(x, y):
    owner = x * 1.0
    view = owner.T_
    before = view * 2.0
    ops.relu_(view)
    return owner * y, before, view


def _reversed(x, y):
    owner = x * 1.0
    ops.add_(ops.slice_(owner, None, None, -1, 0), y)
    return owner * owner


def _concatenated(x, y):
    a, b = x * 2.0, y * 3.0
    ops.exp_(ops.concat_([a, b]))
    return a * b


def _concatenated_in_part(x, y):
    a, b = x * 2.0, y * 3.0
    rows = ops.slice_(ops.concat_([a, b]), 2, 4)
    ops.exp_(rows)
    return a * b


def _concatenated_in_part_reference(x, y):
    rows = torch.exp(torch.cat([2 * x, 3 * y])[2:4])
    return _put(2 * x, slice(2, 3), rows[:1]) * _put(3 * y, slice(0, 1), rows[1:])


def _updated_part(x, r):
    owner = x * 1.0
    at = popxl.constant([1], popxl.uint32)
    ops.dynamic_update_(owner.reshape_((4, 3)), at, ops.slice(r, 0, 3, axis=1), [0], [1], True)
    return owner * owner


def _updated_part_reference(x, r):
    return _put(x.reshape(4, 3), slice(1, 2), r[:, :3]).reshape(3, 4) ** 2


def _owner_changed(x, y):
    owner = x * 2.0
    view, returned = ops.slice_(owner, 1, 3), owner.T_
    owner += y
    return view * view, returned


def _overwritten(x, r):
    owner = x * 2.0
    before = owner * owner
    ops.var_updates.copy_var_update_(ops.slice_(owner, 0, 1), r)
    return before, owner * owner


def _in_turn(x, y):
    owner = x * 2.0
    for i in range(3):
        ops.add_(ops.slice_(owner, i, i + 1), ops.slice(y, i, i + 1) * float(i))
    return owner * owner


def _detached(x, y):
    owner = x * 2.0
    view = ops.detach_(owner)
    view += y
    return owner * owner


def _twice(x, r):
    owner = x * 2.0
    row = ops.slice_(owner, 0, 1)
    for _ in range(2):
        row += row
        row += r
    return owner * row


def _twice_reference(x, r):
    row = 8 * x[:1] + 3 * r
    return _put(2 * x, slice(0, 1), row) * row


CASES = cases_of(
    [
        OpRecord("slice", _slice, [X, ROW], _slice_reference),
        OpRecord("view of a view", _view_of_view, [X, Y], _view_of_view_reference),
        OpRecord("flattened slice", _flattened_slice, [X, ROW], _flattened_slice_reference),
        OpRecord("transposed", _transposed, [X, Y],
                 lambda x, y: (x.relu() * y, 2 * x.T, x.relu().T)),
        OpRecord("reversed", _reversed, [X, Y], lambda x, y: (x + y.flip(0)) ** 2),
        OpRecord("concatenated", _concatenated, [X, Y],
                 lambda x, y: torch.exp(2 * x) * torch.exp(3 * y)),
        OpRecord("concatenated in part", _concatenated_in_part, [X, Y],
                 _concatenated_in_part_reference),
        OpRecord("updated part", _updated_part, [X, ROW], _updated_part_reference),
        OpRecord("owner changed", _owner_changed, [X, Y],
                 lambda x, y: ((2 * x + y)[1:3] ** 2, (2 * x + y).T)),
        OpRecord("overwritten", _overwritten, [X, ROW],
                 lambda x, r: (4 * x**2, _put(2 * x, slice(0, 1), r) ** 2)),
        OpRecord("in turn", _in_turn, [X, Y],
                 lambda x, y: (2 * x + y * torch.arange(3.0)[:, None]) ** 2),
        OpRecord("detached", _detached, [X, Y], lambda x, y: ((2 * x).detach() + y) ** 2),
        OpRecord("twice", _twice, [X, ROW], _twice_reference),
    ]
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def program():
    run_cases(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_values_and_gradients(case):
    check(case)
