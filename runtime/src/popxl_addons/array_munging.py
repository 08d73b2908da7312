"""Host arrays of replicated programs: splitting into shards, repeating, and the inverses.

Functions that make one array for each of n shards or copies return them along a new first axis,
which is the layout of a variable with n replica groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

__all__ = [
    "handle_negative_axis", "pad_axis", "repeat", "repeat_axis", "repeat_shard", "shard", "shard2D",
    "split2D", "squeeze_safe", "tensor_parallel_input", "tensor_parallel_output", "unshard",
    "unshard2D", "unshard_arrays",
]  # fmt: skip


def handle_negative_axis(x: np.ndarray, axis: int) -> int:
    """Return a nonnegative `axis`; raises IndexError if `x` has no such axis."""
    if not -x.ndim <= axis < x.ndim:
        raise IndexError(f"an array of shape {x.shape} has no axis {axis}")
    return axis % x.ndim


def _split(x: np.ndarray, n: int, axis: int) -> list[np.ndarray]:
    axis = handle_negative_axis(x, axis)
    if n < 1 or x.shape[axis] % n:
        raise ValueError(f"axis {axis} of an array of shape {x.shape} cannot be cut into {n} parts")
    return np.split(x, n, axis)


def shard(x: np.ndarray, n: int, axis: int) -> np.ndarray:
    """Split `axis` into n equal shards: -> (n, *shape with that axis divided by n)."""
    return np.ascontiguousarray(np.stack(_split(np.asarray(x), n, axis)))


def unshard_arrays(xs: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Concatenate shards along `axis`; the inverse of splitting."""
    return np.concatenate(list(xs), axis)


def unshard(x: np.ndarray, axis: int) -> np.ndarray:
    """Concatenate shards (n, ...) along `axis`; the inverse of `shard`."""
    return unshard_arrays(list(x), axis)


def repeat(x: np.ndarray, n: int, axis: int = 0) -> np.ndarray:
    """Repeat an array n times along a new axis: -> (n, *shape) for axis 0."""
    return np.repeat(np.expand_dims(x, axis), n, axis)


def repeat_axis(x: np.ndarray, n: int, axis: int = 0) -> np.ndarray:
    """Repeat the whole array n times along an existing axis: [a, b] -> [a, b, a, b]."""
    return np.concatenate([x] * n, axis)


def split2D(  # noqa: N802 - PopXL's name
    x: np.ndarray, n_1: int, n_2: int, axis_1: int, axis_2: int
) -> list[list[np.ndarray]]:
    """Split `axis_1` into n_1 pieces, and `axis_2` of each piece into n_2 pieces."""
    return [_split(row, n_2, axis_2) for row in _split(np.asarray(x), n_1, axis_1)]


def shard2D(  # noqa: N802
    x: np.ndarray, n_1: int, n_2: int, axis_1: int, axis_2: int
) -> np.ndarray:
    """Split two axes as `split2D` does, and stack the pieces row by row: (n_1 * n_2, ...)."""
    return np.stack([part for row in split2D(x, n_1, n_2, axis_1, axis_2) for part in row])


def unshard2D(  # noqa: N802
    x: np.ndarray, n_1: int, n_2: int, axis_1: int, axis_2: int
) -> np.ndarray:
    """Join shards of two axes, the inverse of `shard2D`; ValueError unless there are n_1 * n_2."""
    if x.shape[0] != n_1 * n_2:
        raise ValueError(f"expected {n_1} x {n_2} parts along the first axis of shape {x.shape}")
    rows = [unshard(x[i * n_2 : (i + 1) * n_2], axis_2) for i in range(n_1)]
    return unshard_arrays(rows, axis_1)


def repeat_shard(
    x: np.ndarray,
    n_repeats: int,
    n_shards: int,
    shard_axis: int,
    sharded_tensor: Literal["contiguous", "strided"] = "contiguous",
) -> np.ndarray:
    """Split into `n_shards` shards, each repeated `n_repeats` times: (n_repeats * n_shards, ...).

    Args:
        sharded_tensor: "contiguous": the shards of one copy are neighbours, [s0, s1, s0, s1];
            "strided": copies of one shard are, [s0, s0, s1, s1].
    """
    shards = shard(x, n_shards, shard_axis)
    if sharded_tensor == "contiguous":
        return np.concatenate([shards] * n_repeats)
    if sharded_tensor == "strided":
        return np.repeat(shards, n_repeats, 0)
    raise ValueError(f"sharded_tensor must be 'contiguous' or 'strided', but is {sharded_tensor!r}")


def _data_parallel(tp: int, rf: int) -> int:
    if tp < 1 or rf % tp:
        raise ValueError(f"tensor parallelism of {tp} does not divide {rf} replicas")
    return rf // tp


def tensor_parallel_input(
    input_data: np.ndarray,
    tp: int,
    rf: int,
    repeat_fn: Callable[[np.ndarray, int], np.ndarray] | None = None,
) -> np.ndarray:
    """Lay out stream input such that all replicas of a tensor-parallel group get the same sample.

    Replica r is member `r % tp` of data-parallel instance `r // tp`.

    Args:
        input_data: (host_transfers * rf / tp, *shape): data-parallel samples of the first
            transfer, then of the second, and so on.
        tp: replicas in a tensor-parallel group.
        rf: number of replicas.
        repeat_fn: `repeat_fn(x, i)` gives the data of member i of each group, where x is a copy of
            the data of shape (n, 1, *shape), as is the result; default: all members get the same.

    Returns:
        (host_transfers, rf, *shape), without those of the first two axes that have length 1.

    Raises:
        ValueError: `tp` does not divide `rf`, or the samples fill no whole number of transfers.
    """
    dp = _data_parallel(tp, rf)
    data = np.asarray(input_data)
    if data.shape[0] % dp:
        raise ValueError(
            f"the first axis of the data, {data.shape}, must be a multiple of the {dp} "
            "data-parallel instances"
        )
    copies = (data[:, None].copy() for _ in range(tp))
    members = [x if repeat_fn is None else repeat_fn(x, i) for i, x in enumerate(copies)]
    joined = np.concatenate(members, axis=1)
    return squeeze_safe(joined.reshape(-1, rf, *joined.shape[2:]), (0, 1))


def tensor_parallel_output(
    output_data: np.ndarray,
    num_host_transfers: int,
    tp: int,
    rf: int,
    data_shape: tuple[int, ...],
    tp_identical: bool = True,
    true_num_host_transfers: int | None = None,
) -> np.ndarray:
    """Undo the layout of `tensor_parallel_input` for a stream's output.

    Args:
        output_data: (num_host_transfers, rf, *data_shape); dims equal to 1 may be missing.
        tp_identical: whether the members of a group give the same result.
        true_num_host_transfers: keep only so many transfers, the rest was padding.

    Returns:
        (transfers * rf / tp, *data_shape), with an axis of length tp before `data_shape` if the
        members differ.
    """
    dp = _data_parallel(tp, rf)
    full = np.asarray(output_data).reshape(num_host_transfers, dp, tp, *data_shape)
    kept = full[:true_num_host_transfers]
    if tp_identical:
        return kept[:, :, 0].reshape(-1, *data_shape)
    return kept.reshape(-1, tp, *data_shape)


def pad_axis(x: np.ndarray, n: int, axis: int, value: int | float = 0) -> np.ndarray:
    """Pad `axis` with `value` to length n; raises ValueError if it is longer."""
    axis = handle_negative_axis(x, axis)
    missing = n - x.shape[axis]
    if missing < 0:
        raise ValueError(f"axis {axis} of an array of shape {x.shape} is longer than {n}")
    widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return np.pad(x, widths, constant_values=value)


def squeeze_safe(x: np.ndarray, axis: int | Sequence[int] | None = None) -> np.ndarray:
    """Drop those of the given axes (default: all) that have length 1, and keep the other axes."""
    axes = range(x.ndim) if axis is None else ([axis] if isinstance(axis, int) else axis)
    droppable = {handle_negative_axis(x, a) for a in axes}
    return np.squeeze(x, tuple(a for a in droppable if x.shape[a] == 1))
