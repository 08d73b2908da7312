import numpy as np
import pytest

from popxl_addons.array_munging import (
    handle_negative_axis,
    pad_axis,
    repeat,
    repeat_axis,
    repeat_shard,
    shard,
    shard2D,
    split2D,
    squeeze_safe,
    tensor_parallel_input,
    tensor_parallel_output,
    unshard,
    unshard2D,
    unshard_arrays,
)

X = np.arange(24).reshape(4, 6)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_shard_puts_the_parts_on_a_new_first_axis(axis):
    parts = shard(X, 2, axis)
    assert parts.shape == ((2, 2, 6) if axis == 0 else (2, 4, 3))
    assert np.array_equal(parts[1], np.split(X, 2, axis)[1])
    assert np.array_equal(unshard(parts, axis), X)
    assert np.array_equal(unshard_arrays(list(parts), axis), X)


def test_shard_needs_a_divisible_axis():
    with pytest.raises(ValueError, match="cannot be cut into 4"):
        shard(X, 4, 1)
    with pytest.raises(IndexError, match="no axis 2"):
        shard(X, 2, 2)


def test_shard_in_two_dimensions_keeps_rows_together():
    parts = shard2D(X, 2, 3, 0, 1)
    assert parts.shape == (6, 2, 2)
    assert np.array_equal(parts[4], X[2:, 2:4])
    assert np.array_equal(split2D(X, 2, 3, 0, 1)[1][1], parts[4])
    assert np.array_equal(unshard2D(parts, 2, 3, 0, 1), X)
    with pytest.raises(ValueError, match="2 x 2"):
        unshard2D(parts, 2, 2, 0, 1)


def test_repeats():
    a = np.array([1, 2])
    assert repeat(a, 3).tolist() == [[1, 2]] * 3
    assert repeat(a, 2, axis=1).tolist() == [[1, 1], [2, 2]]
    assert repeat_axis(a, 2).tolist() == [1, 2, 1, 2]


def test_repeated_shards_in_both_orders():
    a = np.array([1, 2])
    assert repeat_shard(a, 2, 2, 0).ravel().tolist() == [1, 2, 1, 2]
    assert repeat_shard(a, 2, 2, 0, "strided").ravel().tolist() == [1, 1, 2, 2]
    with pytest.raises(ValueError, match="sharded_tensor"):
        repeat_shard(a, 2, 2, 0, "diagonal")


def test_tensor_parallel_groups_get_one_sample_each():
    transfers, dp, tp = 3, 2, 2
    samples = np.arange(transfers * dp * 5).reshape(transfers * dp, 5)
    laid_out = tensor_parallel_input(samples, tp, dp * tp)
    assert laid_out.shape == (transfers, dp * tp, 5)
    assert np.array_equal(laid_out[2, 0], laid_out[2, 1])
    assert np.array_equal(laid_out[2, 3], samples[2 * dp + 1])
    back = tensor_parallel_output(laid_out, transfers, tp, dp * tp, (5,))
    assert np.array_equal(back, samples)


def test_members_of_a_group_may_differ():
    samples, calls = np.array([[10.0], [20.0]]), []

    def offset(x, i):
        calls.append((x.shape, i))
        x += i  # a copy of its own, for each member
        return x

    laid_out = tensor_parallel_input(samples, 2, 2, offset)
    assert calls == [((2, 1, 1), 0), ((2, 1, 1), 1)]
    assert laid_out.tolist() == [[[10], [11]], [[20], [21]]]
    assert samples.tolist() == [[10], [20]]
    both = tensor_parallel_output(laid_out, 2, 2, 2, (1,), tp_identical=False)
    assert both.tolist() == [[[10], [11]], [[20], [21]]]
    first = tensor_parallel_output(laid_out, 2, 2, 2, (1,), true_num_host_transfers=1)
    assert first.tolist() == [[10]]


def test_axes_of_one_transfer_or_one_replica_are_dropped():
    one = np.arange(5)[None]
    assert tensor_parallel_input(one, 2, 2).shape == (2, 5)
    assert tensor_parallel_input(one, 1, 1).shape == (5,)
    assert tensor_parallel_input(np.zeros((3, 1, 5)), 1, 1).shape == (3, 1, 5)


def test_layouts_must_fit():
    with pytest.raises(ValueError, match="does not divide"):
        tensor_parallel_input(X, 4, 2)
    with pytest.raises(ValueError, match="does not divide"):
        tensor_parallel_input(X, 3, 4)
    with pytest.raises(ValueError, match="multiple of the 3"):
        tensor_parallel_input(X, 2, 6)


def test_pad_axis_appends_up_to_a_length():
    padded = pad_axis(X, 8, -1, value=7)
    assert padded.shape == (4, 8)
    assert (padded[:, 6:] == 7).all()
    assert np.array_equal(padded[:, :6], X)
    with pytest.raises(ValueError, match="longer"):
        pad_axis(X, 3, 0)


def test_squeeze_safe_keeps_longer_axes():
    x = np.zeros((1, 3, 1))
    assert squeeze_safe(x).shape == (3,)
    assert squeeze_safe(x, (0, 1)).shape == (3, 1)
    assert squeeze_safe(x, 1).shape == (1, 3, 1)


def test_negative_axes_count_from_the_back():
    assert handle_negative_axis(X, -1) == 1


@pytest.mark.parametrize(("shape", "axis"), [((2, 3), 2), ((2, 3), -3), ((), 0), ((), -1)])
def test_an_axis_out_of_range_is_an_index_error(shape, axis):
    with pytest.raises(IndexError, match=f"has no axis {axis}"):
        handle_negative_axis(np.zeros(shape), axis)
    with pytest.raises(IndexError):
        shard(np.zeros(shape), 1, axis)
