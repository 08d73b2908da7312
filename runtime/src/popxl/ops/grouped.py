"""Grouped matmul (ragged dot): rows sorted by group, one matrix per group.

A loop over groups multiplies tiles of rows, as many as a group has, so that work and memory go by
the rows: XLA's own ragged product, but on TPUs, masks the rows of every group and multiplies them
all with every matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from popxl._ir.argument_checks import check_integer
from popxl._ir.op import Op
from popxl._ir.op_registry import NoGrad, define
from popxl.ops._emit import emit
from popxl.ops._kernel_registry import KERNELS, Shapes
from popxl.ops._numerics import (
    check_floating,
    check_same_dtype,
    matmul_operands,
    matmul_precision,
    upcast_half_types,
)
from popxl.ops._scatter_add import scatter_add
from popxl.tensor import Tensor

TILES = (512, 256, 128, 16)
"""Rows of a tile: of a group whole ones, then smaller ones for the rest."""

EMPTY = 96
"""Rows of a tile that may be of no use: another tile would read the matrix again, which takes
longer than multiplying them."""


def _check_operands(x: Any, matrices: Any, sizes: Any, contracted: int) -> None:
    for factor in (x, matrices):
        check_floating(factor)
    check_same_dtype(x, matrices)
    _check_int32("sizes", sizes)
    if x.ndim != 2 or matrices.ndim != 3 or sizes.shape != matrices.shape[:1]:
        raise ValueError(
            "it takes rows (rows, in), a matrix of each group (groups, in, out), or all in a "
            "row, and the sizes (groups,), but the shapes are "
            f"{x.shape}, {matrices.shape} and {sizes.shape}"
        )
    if not sizes.size:
        raise ValueError("it needs at least one group, but there is none")
    if x.shape[1] != matrices.shape[contracted]:
        raise ValueError(
            f"rows of {x.shape[1]} elements cannot be multiplied with matrices {matrices.shape}"
        )


def _check_rows(x: Any, rows: Any, num_out_rows: int | None) -> None:
    if rows is None and num_out_rows is not None:
        raise ValueError(
            "num_out_rows needs `rows`, to which the products are added, but there are none"
        )
    if rows is None:
        return
    _check_int32("rows", rows)
    if rows.ndim != 1 or (num_out_rows is not None and rows.shape != x.shape[:1]):
        raise ValueError(
            f"`rows` has a number for each row, but its shape is {rows.shape}, that of x {x.shape}"
        )


def _check_int32(name: str, indices: Any) -> None:
    if indices.dtype != jnp.int32:
        raise TypeError(f"{name} are int32, not {indices.dtype}: use ops.cast")


def _matrix_list(matrices: Any, sizes: Any) -> Any:
    """Returns the matrices of all groups as one array (groups, in, out)."""
    groups = sizes.size
    if matrices.ndim == 2 and groups and matrices.shape[0] % groups == 0:
        return matrices.reshape(groups, matrices.shape[0] // groups, matrices.shape[1])
    return matrices


def _update_by_tiles(
    end: Any, group_rows: Any, rows: int, value: Any, update: Callable[..., Any]
) -> Any:
    """Applies `update` to `value` for each tile of a group's rows.

    Args:
        end: row after the group; `group_rows`: rows that it has; `rows`: those of all groups.
        update: `update(value, first row of the tile, which of its rows are the group's)`; the first
            row is such that all rows of the tile exist.
    """
    start = end - group_rows
    counts = sorted({min(count, rows) for count in TILES}, reverse=True)
    for count in counts:
        slack = count - 1 if count == counts[-1] else min(EMPTY, 3 * count // 4)

        def update_tile(i: Any, value: Any, start: Any = start, count: int = count) -> Any:
            begin = start + i * count
            first = jnp.minimum(begin, rows - count)
            at = first + jnp.arange(count)[:, None]
            return update(value, first, (at >= begin) & (at < end))

        full_tiles = (group_rows + slack) // count
        value = lax.fori_loop(0, full_tiles, update_tile, value)
        start = start + full_tiles * count
        group_rows = jnp.maximum(group_rows - full_tiles * count, 0)
    return value


def _group_bounds(sizes: Any, num_rows: int) -> tuple[Any, Any]:
    """Returns each group's end row and number of rows, clipped to the existing rows."""
    ends = jnp.minimum(jnp.cumsum(jnp.clip(sizes, 0, num_rows)), num_rows)
    return ends, jnp.diff(ends, prepend=0)


def _take_tile_rows(x: Any, rows: Any, first: Any, count: int) -> Any:
    """Returns a tile of `count` rows from row `first`, of x[rows], or of `x` if `rows` is None.

    Rows with an index out of range are zeros.
    """
    if rows is None:
        return lax.dynamic_slice(x, (first, 0), (count, x.shape[1]))
    picked = lax.dynamic_slice(rows, (first,), (count,))
    return x.at[picked].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def grouped_product(
    x: Any, matrices: Any, sizes: Any, rows: Any, transpose: bool, num_out_rows: int | None
) -> Any:
    """Multiplies each row of x (rows, in) with its group's matrix: (rows, out).

    With `num_out_rows`, the products are scatter-added at `rows`, in float32, into so many rows;
    without it, `rows` are the rows of x to take.
    """
    count = (x if rows is None else rows).shape[0]
    ends, sizes = _group_bounds(sizes, count)
    contracted = (((1,), (1 if transpose else 0,)), ((), ()))
    features, dtype = matrices.shape[1 if transpose else 2], x.dtype
    picked, target = (rows, None) if num_out_rows is None else (None, rows)

    def multiply_group(g: Any, out: Any) -> Any:
        (matrix,) = matmul_operands(lax.dynamic_index_in_dim(matrices, g, keepdims=False))

        def multiply_tile(out: Any, first: Any, in_group: Any) -> Any:
            x_tile = _take_tile_rows(x, picked, first, in_group.shape[0])
            y = lax.dot_general(
                *matmul_operands(x_tile), matrix, contracted,
                precision=matmul_precision(x, matrices), preferred_element_type=_sum_dtype(dtype),
            )  # fmt: skip
            if target is not None:
                at = lax.dynamic_slice(target, (first,), in_group.shape[:1])
                there = in_group[:, 0] & (at >= 0) & (at < num_out_rows)
                return scatter_add(out, jnp.where(there, at, num_out_rows), y)
            there = lax.dynamic_slice(out, (first, 0), y.shape)
            y = jnp.where(in_group, y.astype(dtype), there)
            return lax.dynamic_update_slice(out, y, (first, 0))

        return _update_by_tiles(ends[g], sizes[g], count, out, multiply_tile)

    if num_out_rows is None:
        out = jnp.zeros((count, features), dtype)
    else:
        out = jnp.zeros((num_out_rows, features), _sum_dtype(dtype))
    return lax.fori_loop(0, sizes.shape[0] if count else 0, multiply_group, out).astype(dtype)


def grouped_outer(x: Any, dy: Any, sizes: Any, totals: Any, rows: Any, rows_index_x: bool) -> Any:
    """Adds each group's xᵀ dy to `totals` (groups, in, out), rounded to the dtype of x first.

    `rows` are the row indices of the group's rows in x (`rows_index_x`) or in dy. Rows of other
    groups are zeros in both factors, since they can be infinite.
    """
    count, shape = (dy if rows_index_x else x).shape[0], (x.shape[1], dy.shape[1])
    ends, sizes = _group_bounds(sizes, count)

    def add_group(g: Any, out: Any) -> Any:
        def add_tile(total: Any, first: Any, in_group: Any) -> Any:
            a = _take_tile_rows(x, rows if rows_index_x else None, first, in_group.shape[0])
            b = _take_tile_rows(dy, None if rows_index_x else rows, first, in_group.shape[0])
            return total + lax.dot_general(
                *matmul_operands(jnp.where(in_group, a, 0), jnp.where(in_group, b, 0)),
                (((0,), (0,)), ((), ())),
                precision=matmul_precision(x, dy),
                preferred_element_type=_sum_dtype(x.dtype),
            )

        total = _update_by_tiles(
            ends[g], sizes[g], count, jnp.zeros(shape, _sum_dtype(x.dtype)), add_tile
        )
        previous = lax.dynamic_index_in_dim(out, g, keepdims=False)
        new = upcast_half_types(previous) + upcast_half_types(total.astype(x.dtype))
        return lax.dynamic_update_index_in_dim(out, new.astype(out.dtype), g, 0)

    return lax.fori_loop(0, sizes.shape[0] if count else 0, add_group, totals)


def _sum_dtype(dtype: Any) -> Any:
    """Returns the dtype in which matmuls of a dtype are accumulated: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


# ---- one kernel for plans -----------------------------------------------------------------------
def _num_rows(shapes: Shapes, operand_index: int) -> int:
    """Returns a grouped matmul's rows: of its row-index operand, or else of the first one."""
    return (shapes[operand_index] if len(shapes) > operand_index else shapes[0])[0]


def _product_flops(shapes: Shapes, expected_rows: int | None) -> int:
    """Returns the FLOPs of a grouped matmul, which depend on its rows, not on its groups."""
    rows = _num_rows(shapes, 3) if expected_rows is None else expected_rows
    return 2 * rows * math.prod(shapes[1][1:])


def _outer_flops(shapes: Shapes, expected_rows: int | None) -> int:
    rows = _num_rows(shapes, 4) if expected_rows is None else expected_rows
    return 2 * rows * shapes[0][1] * shapes[1][1]


# With the places of arguments that are no arrays.
_PRODUCT = (grouped_product, _product_flops, (4, 5))
_OUTER_PRODUCT = (grouped_outer, _outer_flops, (5,))


@cache
def _count_as_kernel(
    function: Callable[..., Any],
    flops: Callable[[Shapes, int | None], int],
    static: tuple[int, ...],
    expected_rows: int | None,
) -> Callable[..., Any]:
    """Wraps a function as one kernel of plans, with FLOPs for the expected number of rows."""

    @wraps(function)
    def call_kernel(*operands: Any) -> Any:
        return function(*operands)

    call_kernel.__name__ += "" if expected_rows is None else f"_of_{expected_rows}"
    KERNELS[call_kernel.__name__] = lambda shapes: flops(shapes, expected_rows)
    return jax.jit(call_kernel, static_argnums=static)


# ---- the ops ------------------------------------------------------------------------------------
def _grouped_matmul(
    x: Any,
    matrices: Any,
    sizes: Any,
    rows: Any = None,
    *,
    transpose: bool,
    expected_rows: int | None = None,
    num_out_rows: int | None = None,
) -> Any:
    matrix_list = _matrix_list(matrices, sizes)
    _check_operands(x, matrix_list, sizes, 2 if transpose else 1)
    _check_rows(x, rows, num_out_rows)
    return _count_as_kernel(*_PRODUCT, expected_rows)(
        x, matrix_list, sizes, rows, transpose, num_out_rows
    )


def _outer(x: Any, dy: Any, sizes: Any, *rows: Any, joined: bool, **attrs: Any) -> Any:
    zeros = jnp.zeros((*sizes.shape, x.shape[1], dy.shape[1]), x.dtype)
    out = _outer_onto(zeros, x, dy, sizes, *rows, joined=joined, **attrs)
    return out.reshape(-1, zeros.shape[-1]) if joined else out


def _outer_onto(
    t: Any,
    x: Any,
    dy: Any,
    sizes: Any,
    rows: Any = None,
    *,
    joined: bool,
    rows_index_x: bool = False,
    expected_rows: int | None = None,
) -> Any:
    totals = _matrix_list(t, sizes)
    return _count_as_kernel(*_OUTER_PRODUCT, expected_rows)(
        x, dy, sizes, totals, rows, rows_index_x
    ).reshape(t.shape)


_OUTER = define(
    "grouped_outer_product",
    _outer,
    add_to=_outer_onto,
    grad=NoGrad("second derivatives of grouped products are not supported"),
)


def _grad(ctx: Any, op: Op, dy: Tensor) -> list[Tensor | None]:
    """Returns the gradients of a grouped matmul: its row gather becomes a scatter-add."""
    x, matrices, *routing = op.inputs
    sizes, *rows = map(ctx.fwd, routing)
    transpose, num_out_rows = op.attrs["transpose"], op.attrs.get("num_out_rows")
    expected_rows = {n: x for n, x in op.attrs.items() if n == "expected_rows"}
    dx = dm = None
    if ctx.needs(op, 0):
        attrs = {"transpose": not transpose, **expected_rows}
        if rows and num_out_rows is None:
            attrs["num_out_rows"] = x.shape[0]
        dx = emit(_GROUPED_MATMUL, [dy, ctx.fwd(matrices), sizes, *rows], attrs)[0]
    if ctx.needs(op, 1):
        pair = [dy, ctx.fwd(x)] if transpose else [ctx.fwd(x), dy]
        attrs = {"joined": matrices.rank == 2, **expected_rows}
        if rows:
            attrs["rows_index_x"] = (
                num_out_rows is None
            ) != transpose  # those of the op's own x are picked
        dm = emit(_OUTER, [*pair, sizes, *rows], attrs)[0]
    return [dx, dm, *[None] * len(routing)]


_GROUPED_MATMUL = define("grouped_matmul", _grouped_matmul, grad=_grad)


def grouped_matmul(
    x: Tensor,
    matrices: Tensor,
    sizes: Tensor,
    transpose: bool = False,
    expected_rows: int | None = None,
    rows: Tensor | None = None,
    num_out_rows: int | None = None,
) -> Tensor:
    """Multiplies rows that are sorted by group with their group's matrix.

    Args:
        x: (rows, in).
        matrices: (groups, in, out), or one after the other, (groups × in, out), of the dtype of
            `x`. Half types accumulate in float32.
        sizes: int32 (groups,), how many rows each group has, in their order, at most all together;
            a negative number is 0. Rows that belong to no group give zeros, whatever they hold.
        transpose: the matrices are (out, in).
        expected_rows: rows of a group that plans count on; None: all rows.
        rows: int32 (rows,), which row of `x`, of any number, each one is; zeros where it has none.
            Tiles are gathered as they are multiplied, so that the rows are never in memory all at
            once.
        num_out_rows: rows of the result, if `rows` says to which of them each product is added, in
            float32, by the order of the groups; products for rows that it does not have are left
            out. GPUs add rows of one group that go to the same one in no fixed order.

    Returns:
        (rows or num_out_rows, out). Work and memory go by the rows, whatever the number of groups.

    Raises:
        SpecError: the shapes or dtypes do not fit, or there is no group.
        TypeError, ValueError: `expected_rows` or `num_out_rows` is no number of rows.
    """
    attrs: dict[str, Any] = {"transpose": bool(transpose)}
    for name, value in (("expected_rows", expected_rows), ("num_out_rows", num_out_rows)):
        if value is not None:
            attrs[name] = check_integer("grouped_matmul", name, value, 0)
    inputs = [x, matrices, sizes, *([] if rows is None else [rows])]
    return emit(_GROUPED_MATMUL, inputs, attrs)[0]
