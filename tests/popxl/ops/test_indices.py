"""Indices out of range: the rules of docs/ops.md, for each op and each integer dtype."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.transforms import autodiff
from tests.popxl.ops.harness import compile_quickly, evaluate

N = 200  # more than the narrow dtypes hold
INDICES = {
    np.int32: [0, 7, 199, -1, 200, -200, -201, 2**31 - 1, -(2**31)],
    np.uint32: [0, 7, 199, 200, 2**31 - 1, 2**31, 2**32 - 1],
    np.int8: [0, 7, 127, -1, -128],
    np.uint8: [0, 7, 199, 200, 255],
}
T = np.arange(1, N + 1, dtype=np.float32)


def _gradient_of_gather(t, indices, zeros):
    graph = popxl.gir().create_graph(lambda t, i: ops.gather(t, i, zero_OOR=zeros), t, indices)
    gradient = autodiff(graph, grads_required=graph.inputs[:1])
    call = ops.call_with_info(graph, t, indices)
    ones = popxl.constant(np.ones(indices.shape, np.float32))
    return ops.call(gradient.graph, ones, inputs_dict=gradient.inputs_dict(call))[0]


def _results(t, indices, *starts):
    """Results of each op that reads or writes at indices, in the order of `_expected`."""
    values = popxl.constant(np.arange(indices.nelms) + 0.5, popxl.float32)
    pair = popxl.constant([-1.0, -2.0], popxl.float32)
    classes, on = popxl.constant(N, popxl.int32), popxl.constant([0.0, 1.0], popxl.float32)
    two = t.reshape((1, N))
    image, box = t.reshape((N, 1, 1, 1)), popxl.constant([[0, 0, 1, 1]] * indices.nelms, t.dtype)
    return [
        ops.gather(t, indices),
        ops.tied_gather(t, indices),
        t[indices],
        ops.groupedgather(ops.concat([two, two]), ops.concat([indices.reshape((1, -1))] * 2), 0, 2),
        ops.gather(t, indices, zero_OOR=True),
        _gradient_of_gather(t, indices, False),
        _gradient_of_gather(t, indices, True),
        ops.scatter(t, indices, values),
        ops.scatter_reduce(values, indices, "sum", t),
        ops.scatter_reduce(values, indices, "max", t),
        ops.var_updates.sparse_accumulate_(ops.identity(t), values, indices),
        ops.onehot(indices, classes, on, 1),
        ops.roi_align(image, box, indices, (1, 1), 1.0, 1),
        *(ops.dynamic_slice(t, start, [0], [2], True) for start in starts),
        *(ops.dynamic_update(t, start, pair, [0], [2], True) for start in starts),
    ]


def _expected(given: np.ndarray) -> list[np.ndarray]:
    indices = given.astype(np.int64)
    known = (indices >= 0) & (indices < N)
    near, values = indices.clip(0, N - 1), np.arange(indices.size) + 0.5
    zeros = np.where(known, T[near], 0)
    dense, sparse, hot = np.zeros(N), np.zeros(N), np.zeros((indices.size, N))
    np.add.at(dense, near, 1)
    np.add.at(sparse, indices[known], 1)
    hot[known, indices[known]] = 1
    written, added, largest = T.copy(), T.copy(), T.copy()
    written[indices[known]] = values[known]
    np.add.at(added, indices[known], values[known])
    np.maximum.at(largest, indices[known], values[known])
    parts, updated = [], []
    for start in indices.clip(0, N - 2):
        parts.append(T[start : start + 2])
        updated.append(T.copy())
        updated[-1][start : start + 2] = -1, -2
    taken = T[near]
    return [
        *(taken, taken, taken, np.stack([taken, taken]), zeros, dense, sparse),
        *(written, added, largest, added, hot, taken.reshape(-1, 1, 1, 1)),
        *parts,
        *updated,
    ]


@pytest.mark.parametrize("dtype", INDICES)
def test_what_reads_or_writes_at_an_index_out_of_range_follows_one_table(dtype) -> None:
    compile_quickly()
    indices = np.array(INDICES[dtype], dtype)
    found = evaluate(_results, T, indices, *(indices[i : i + 1] for i in range(indices.size)))
    for number, (ours, expected) in enumerate(zip(found, _expected(indices), strict=True)):
        np.testing.assert_array_equal(ours, expected, err_msg=f"result {number}")


def test_indices_that_are_known_count_from_either_end_or_are_refused() -> None:
    with popxl.Ir().main_graph:
        t = popxl.constant(T)
        for index in (200, -201, [0, 200], np.array([-201]), np.array([2**40])):
            with pytest.raises(IndexError, match="is out of range for axis 0 of size 200"):
                t[index]
        with pytest.raises(ValueError, match=r"gather.*axis 0 of shape \(0,\) has no elements"):
            ops.gather(popxl.constant(np.zeros(0, np.float32)), popxl.variable([0], popxl.int32))
    keys = [[-1, 0, -200], np.array([[3, -2]]), -1]
    for key, found in zip(keys, evaluate(lambda t: [t[k] for k in keys], T), strict=True):
        np.testing.assert_array_equal(found, T[key])


def _at(index: int) -> popxl.Constant:
    return popxl.constant([index], popxl.int32)


VALUE, OF_PARTS = popxl.TensorSpec((1,), popxl.float32), popxl.TensorSpec((2, 5), popxl.float32)
AT_CONSTANTS = {  # (op, smallest index that is refused besides -1)
    "gather": (lambda t, v, p, i: ops.gather(t, _at(i)), N),
    "gather of axis 1": (lambda t, v, p, i: ops.gather(p, _at(i), 1), 5),
    "tied_gather": (lambda t, v, p, i: ops.tied_gather(t, _at(i)), N),
    "a tensor's index": (lambda t, v, p, i: t[_at(i)], N),
    "groupedgather": (
        lambda t, v, p, i: ops.groupedgather(p, popxl.constant([[0], [i]], popxl.int32), 0, 2), 5),
    "scatter": (lambda t, v, p, i: ops.scatter(t, _at(i), v), N),
    "scatter_reduce": (lambda t, v, p, i: ops.scatter_reduce(v, _at(i), "sum", t), N),
    "scatter_reduce of a size": (
        lambda t, v, p, i: ops.scatter_reduce(v, _at(i), "max", axis_size=7), 7),
    "sparse_accumulate": (
        lambda t, v, p, i: ops.var_updates.sparse_accumulate_(ops.identity(t), v, _at(i)), N),
    "roi_align": (
        lambda t, v, p, i: ops.roi_align(
            t.reshape((N, 1, 1, 1)), popxl.constant([[0.0, 0, 1, 1]]), _at(i), (1, 1), 1.0, 1), N),
    "dynamic_slice": (lambda t, v, p, i: ops.dynamic_slice(t, _at(i), [0], [3], True), N - 2),
    "dynamic_slice of two axes": (
        lambda t, v, p, i: ops.dynamic_slice(
            p, popxl.constant([1, i], popxl.int32), [0, 1], [1, 2], True), 4),
    "dynamic_update": (lambda t, v, p, i: ops.dynamic_update(t, _at(i), v, [0], [1], True), N),
    "remote_load": (
        lambda t, v, p, i: ops.remote_load(
            popxl.remote_buffer((2,), popxl.float32, 3), _at(i)), 3),
    "remote_store": (
        lambda t, v, p, i: ops.remote_store(
            popxl.remote_buffer((1,), popxl.float32, 3), _at(i), v), 3),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_CONSTANTS)
def test_a_constant_has_no_index_out_of_range(name: str) -> None:
    build, limit = AT_CONSTANTS[name]
    op = "gather" if name == "a tensor's index" else name.split()[0]

    def write(index: int) -> None:
        specs = popxl.TensorSpec((N,), popxl.float32), VALUE, OF_PARTS
        popxl.Ir().create_graph(lambda t, v, p: build(t, v, p, index) and None, *specs)

    for index in (-1, limit, 2**31 - 1):
        with pytest.raises(IndexError, match=rf"^{op}: index {index} of constant .* below {limit}"):
            write(index)
    for index in (0, limit - 1):
        write(index)


def test_constants_out_of_range_are_zeros_or_no_class_where_that_is_the_rule() -> None:
    outside, on = np.array([-1, 5], np.int32), np.array([0, 1], np.float32)

    def build(t):
        indices, classes = popxl.constant(outside), popxl.constant(4, popxl.int32)
        hot = ops.onehot(indices, classes, popxl.constant(on), 1)
        return [ops.gather(t, indices, zero_OOR=True), hot, ops.nll_loss(hot + 1, indices)]

    taken, hot, loss = evaluate(build, T[:5])
    assert [taken.any(), hot.any(), loss] == [False, False, 0]


def test_the_number_of_classes_is_a_constant() -> None:
    with popxl.Ir().main_graph:
        one, values = popxl.variable(1, popxl.int32), popxl.constant([0.0, 1.0])
        with pytest.raises(ValueError, match=r"^onehot: .* must be a constant"):
            ops.onehot(one, one, values, 0)
