"""Products of rows that are sorted by group with a matrix of each group.

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

from popxl._ir.argument_checks import integer_of
from popxl._ir.op import Op
from popxl._ir.op_registry import NoGrad, define
from popxl.ops._emit import emit
from popxl.ops._kernels import KERNELS, Shapes
from popxl.ops._numerics import check_floating, check_same_dtype, factors, precision_of, widen
from popxl.ops._rows import add_rows
from popxl.tensor import Tensor

TILES = (512, 256, 128, 16)
"""Rows of a tile: of a group whole ones, then smaller ones for the rest."""

EMPTY = 96
"""Rows of a tile that may be of no use: another tile would read the matrix again, which takes
longer than multiplying them."""


def _check(x: Any, matrices: Any, sizes: Any, contracted: int) -> None:
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


def _check_rows(x: Any, rows: Any, into: int | None) -> None:
    if rows is None and into is not None:
        raise ValueError("it adds into rows that `rows` says, but there are none")
    if rows is None:
        return
    _check_int32("rows", rows)
    if rows.ndim != 1 or (into is not None and rows.shape != x.shape[:1]):
        raise ValueError(
            f"`rows` has a number for each row, but its shape is {rows.shape}, that of x {x.shape}"
        )


def _check_int32(name: str, numbers: Any) -> None:
    if numbers.dtype != jnp.int32:
        raise TypeError(f"{name} are int32, not {numbers.dtype}: use ops.cast")


def _apart(matrices: Any, sizes: Any) -> Any:
    """A matrix of each group, of those that lie one after the other."""
    groups = sizes.size
    if matrices.ndim == 2 and groups and matrices.shape[0] % groups == 0:
        return matrices.reshape(groups, matrices.shape[0] // groups, matrices.shape[1])
    return matrices


def _tiles(end: Any, left: Any, rows: int, value: Any, tile: Callable[..., Any]) -> Any:
    """Change `value` by each tile of a group.

    Args:
        end: row after the group; `left`: rows that it has; `rows`: those of all groups.
        tile: `tile(value, its first row, which of its rows are the group's)`; the first row is such
            that all rows of the tile exist.
    """
    start = end - left
    counts = sorted({min(count, rows) for count in TILES}, reverse=True)
    for count in counts:
        room = count - 1 if count == counts[-1] else min(EMPTY, 3 * count // 4)

        def one(i: Any, value: Any, start: Any = start, count: int = count) -> Any:
            begin = start + i * count
            first = jnp.minimum(begin, rows - count)
            at = first + jnp.arange(count)[:, None]
            return tile(value, first, (at >= begin) & (at < end))

        whole = (left + room) // count
        value = lax.fori_loop(0, whole, one, value)
        start, left = start + whole * count, jnp.maximum(left - whole * count, 0)
    return value


def _bounds(sizes: Any, rows: int) -> tuple[Any, Any]:
    """Rows up to the end of each group, and rows of it, of those that there are."""
    ends = jnp.minimum(jnp.cumsum(jnp.clip(sizes, 0, rows)), rows)
    return ends, jnp.diff(ends, prepend=0)


def _rows_at(x: Any, rows: Any, first: Any, count: int) -> Any:
    """Rows of a tile, of those that `rows` says or, if it is None, of `x` as it is; zeros where `x`
    has no such row."""
    if rows is None:
        return lax.dynamic_slice(x, (first, 0), (count, x.shape[1]))
    picked = lax.dynamic_slice(rows, (first,), (count,))
    return x.at[picked].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def grouped_product(
    x: Any, matrices: Any, sizes: Any, rows: Any, transpose: bool, into: int | None
) -> Any:
    """Of each row the product with its group's matrix; with `into` rows of results, those that
    `rows` says add up, in float32."""
    count = (x if rows is None else rows).shape[0]
    ends, sizes = _bounds(sizes, count)
    contracted = (((1,), (1 if transpose else 0,)), ((), ()))
    features, dtype = matrices.shape[1 if transpose else 2], x.dtype
    picked, target = (rows, None) if into is None else (None, rows)

    def group(g: Any, out: Any) -> Any:
        (matrix,) = factors(lax.dynamic_index_in_dim(matrices, g, keepdims=False))

        def tile(out: Any, first: Any, own: Any) -> Any:
            part = _rows_at(x, picked, first, own.shape[0])
            y = lax.dot_general(
                *factors(part), matrix, contracted,
                precision=precision_of(x, matrices), preferred_element_type=_sums(dtype),
            )  # fmt: skip
            if target is not None:
                at = lax.dynamic_slice(target, (first,), own.shape[:1])
                there = own[:, 0] & (at >= 0) & (at < into)
                return add_rows(out, jnp.where(there, at, into), y)
            there = lax.dynamic_slice(out, (first, 0), y.shape)
            y = jnp.where(own, y.astype(dtype), there)
            return lax.dynamic_update_slice(out, y, (first, 0))

        return _tiles(ends[g], sizes[g], count, out, tile)

    if into is None:
        out = jnp.zeros((count, features), dtype)
    else:
        out = jnp.zeros((into, features), _sums(dtype))
    return lax.fori_loop(0, sizes.shape[0] if count else 0, group, out).astype(dtype)


def grouped_outer(x: Any, dy: Any, sizes: Any, onto: Any, rows: Any, of_x: bool) -> Any:
    """Of each group the product of its rows, xᵀ dy, added to `onto`, as if it were made first.
    `rows` says which ones they are of x or else of dy. Rows of others are zeros in both factors,
    since they may be infinite."""
    count, shape = (dy if of_x else x).shape[0], (x.shape[1], dy.shape[1])
    ends, sizes = _bounds(sizes, count)

    def group(g: Any, out: Any) -> Any:
        def tile(total: Any, first: Any, own: Any) -> Any:
            a = _rows_at(x, rows if of_x else None, first, own.shape[0])
            b = _rows_at(dy, None if of_x else rows, first, own.shape[0])
            return total + lax.dot_general(
                *factors(jnp.where(own, a, 0), jnp.where(own, b, 0)),
                (((0,), (0,)), ((), ())),
                precision=precision_of(x, dy),
                preferred_element_type=_sums(x.dtype),
            )

        total = _tiles(ends[g], sizes[g], count, jnp.zeros(shape, _sums(x.dtype)), tile)
        here = lax.dynamic_index_in_dim(out, g, keepdims=False)
        new = widen(here) + widen(total.astype(x.dtype))
        return lax.dynamic_update_index_in_dim(out, new.astype(out.dtype), g, 0)

    return lax.fori_loop(0, sizes.shape[0] if count else 0, group, onto)


def _sums(dtype: Any) -> Any:
    """The type that products of a type are added up in."""
    return jnp.promote_types(dtype, jnp.float32)


# ---- one kernel for plans -----------------------------------------------------------------------
def _rows_of(shapes: Shapes, place: int) -> int:
    """How many rows there are: as `rows` has, an operand at a place, or the first operand."""
    return (shapes[place] if len(shapes) > place else shapes[0])[0]


def _product_flops(shapes: Shapes, usual: int | None) -> int:
    """FLOPs by the rows, whatever the number of groups."""
    rows = _rows_of(shapes, 3) if usual is None else usual
    return 2 * rows * math.prod(shapes[1][1:])


def _outer_flops(shapes: Shapes, usual: int | None) -> int:
    rows = _rows_of(shapes, 4) if usual is None else usual
    return 2 * rows * shapes[0][1] * shapes[1][1]


# With the places of arguments that are no arrays.
_PRODUCT = (grouped_product, _product_flops, (4, 5))
_OUTER_PRODUCT = (grouped_outer, _outer_flops, (5,))


@cache
def _kernel(
    function: Callable[..., Any],
    flops: Callable[[Shapes, int | None], int],
    static: tuple[int, ...],
    usual: int | None,
) -> Callable[..., Any]:
    """A function as plans take it for a kernel, whose operations go by the usual number of rows."""

    @wraps(function)
    def kernel(*operands: Any) -> Any:
        return function(*operands)

    kernel.__name__ += "" if usual is None else f"_of_{usual}"
    KERNELS[kernel.__name__] = lambda shapes: flops(shapes, usual)
    return jax.jit(kernel, static_argnums=static)


# ---- the ops ------------------------------------------------------------------------------------
def _grouped_matmul(
    x: Any,
    matrices: Any,
    sizes: Any,
    rows: Any = None,
    *,
    transpose: bool,
    usual: int | None = None,
    into: int | None = None,
) -> Any:
    apart = _apart(matrices, sizes)
    _check(x, apart, sizes, 2 if transpose else 1)
    _check_rows(x, rows, into)
    return _kernel(*_PRODUCT, usual)(x, apart, sizes, rows, transpose, into)


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
    of_x: bool = False,
    usual: int | None = None,
) -> Any:
    onto = _apart(t, sizes)
    return _kernel(*_OUTER_PRODUCT, usual)(x, dy, sizes, onto, rows, of_x).reshape(t.shape)


_OUTER = define(
    "grouped_outer_product",
    _outer,
    onto=_outer_onto,
    grad=NoGrad("second derivatives of grouped products are not supported"),
)


def _grad(ctx: Any, op: Op, dy: Tensor) -> list[Tensor | None]:
    """Rows that were picked add up in the gradient, and those that added up are picked."""
    x, matrices, *others = op.inputs
    sizes, *rows = map(ctx.fwd, others)
    transpose, into = op.attrs["transpose"], op.attrs.get("into")
    usual = {n: x for n, x in op.attrs.items() if n == "usual"}
    dx = dm = None
    if ctx.needs(op, 0):
        attrs = {"transpose": not transpose, **usual}
        if rows and into is None:
            attrs["into"] = x.shape[0]
        dx = emit(_GROUPED_MATMUL, [dy, ctx.fwd(matrices), sizes, *rows], attrs)[0]
    if ctx.needs(op, 1):
        pair = [dy, ctx.fwd(x)] if transpose else [ctx.fwd(x), dy]
        attrs = {"joined": matrices.rank == 2, **usual}
        if rows:
            attrs["of_x"] = (into is None) != transpose  # those of the op's own x are picked
        dm = emit(_OUTER, [*pair, sizes, *rows], attrs)[0]
    return [dx, dm, *[None] * len(others)]


_GROUPED_MATMUL = define("grouped_matmul", _grouped_matmul, grad=_grad)


def grouped_matmul(
    x: Tensor,
    matrices: Tensor,
    sizes: Tensor,
    transpose: bool = False,
    usual: int | None = None,
    rows: Tensor | None = None,
    into: int | None = None,
) -> Tensor:
    """Multiply rows, which are sorted by group, with the matrix of their group.

    Args:
        x: (rows, in).
        matrices: (groups, in, out), or one after the other, (groups × in, out), of the dtype of
            `x`. Half types accumulate in float32.
        sizes: int32 (groups,), how many rows each group has, in their order, at most all together;
            a negative number is 0. Rows that belong to no group give zeros, whatever they hold.
        transpose: the matrices are (out, in).
        usual: how many rows plans think that groups have; None: all.
        rows: int32 (rows,), which row of `x`, of any number, each one is; zeros where it has none.
            Tiles are gathered as they are multiplied, so that the rows are never in memory all at
            once.
        into: `rows` says instead to which of so many rows of the result each product is added, in
            float32, by the order of the groups; products for rows that it does not have are left
            out. GPUs add rows of one group that go to the same one in no fixed order.

    Returns:
        (rows or into, out). Work and memory go by the rows, whatever the number of groups.

    Raises:
        SpecError: the shapes or dtypes do not fit, or there is no group.
        TypeError, ValueError: `usual` or `into` is no number of rows.
    """
    attrs: dict[str, Any] = {"transpose": bool(transpose)}
    for name, value in (("usual", usual), ("into", into)):
        if value is not None:
            attrs[name] = integer_of("grouped_matmul", name, value, 0)
    inputs = [x, matrices, sizes, *([] if rows is None else [rows])]
    return emit(_GROUPED_MATMUL, inputs, attrs)[0]
