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

from popxl._ir.op import Op
from popxl._ir.opdef import NoGrad, define
from popxl.ops._emit import emit
from popxl.ops._kernels import KERNELS, Shapes
from popxl.ops._numerics import factors, widen
from popxl.tensor import Tensor

TILES = (256, 64, 16)
"""Rows of a tile: of a group whole ones, then smaller ones for the rest."""


def _check(x: Any, matrices: Any, sizes: Any, contracted: int) -> None:
    if x.ndim != 2 or matrices.ndim != 3 or sizes.shape != matrices.shape[:1]:
        raise ValueError(
            "it takes rows (rows, in), a matrix of each group (groups, in, out), or all in a "
            "row, and the sizes (groups,), but the shapes are "
            f"{x.shape}, {matrices.shape} and {sizes.shape}"
        )
    if x.shape[1] != matrices.shape[contracted]:
        raise ValueError(
            f"rows of {x.shape[1]} elements cannot be multiplied with matrices {matrices.shape}"
        )


def _apart(matrices: Any, sizes: Any) -> Any:
    """A matrix of each group, of those that lie one after the other."""
    groups = sizes.size
    if matrices.ndim == 2 and groups and matrices.shape[0] % groups == 0:
        return matrices.reshape(groups, -1, matrices.shape[1])
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
        # A tile that is mostly full is less work than several small ones: each reads the matrix.
        room = count - 1 if count == counts[-1] else count // 4

        def one(i: Any, value: Any, start: Any = start, count: int = count) -> Any:
            begin = start + i * count
            first = jnp.minimum(begin, rows - count)
            at = first + jnp.arange(count)[:, None]
            return tile(value, first, (at >= begin) & (at < end))

        whole = (left + room) // count
        value = lax.fori_loop(0, whole, one, value)
        start, left = start + whole * count, jnp.maximum(left - whole * count, 0)
    return value


def grouped_product(x: Any, matrices: Any, sizes: Any, transpose: bool) -> Any:
    """Of each row the product with its group's matrix."""
    ends, rows = jnp.cumsum(sizes), x.shape[0]
    contracted = (((1,), (1 if transpose else 0,)), ((), ()))
    features = matrices.shape[1 if transpose else 2]

    def group(g: Any, out: Any) -> Any:
        (matrix,) = factors(lax.dynamic_index_in_dim(matrices, g, keepdims=False))

        def tile(out: Any, first: Any, own: Any) -> Any:
            part = lax.dynamic_slice(x, (first, 0), (own.shape[0], x.shape[1]))
            there = lax.dynamic_slice(out, (first, 0), (own.shape[0], features))
            y = lax.dot_general(
                *factors(part), matrix, contracted, preferred_element_type=_sums(x.dtype)
            )
            y = jnp.where(own, y.astype(x.dtype), there)
            return lax.dynamic_update_slice(out, y, (first, 0))

        return _tiles(ends[g], sizes[g], rows, out, tile)

    out = jnp.zeros((rows, features), x.dtype)
    return lax.fori_loop(0, sizes.shape[0] if rows else 0, group, out)


def grouped_outer(x: Any, dy: Any, sizes: Any, onto: Any) -> Any:
    """Of each group the product of its rows, xᵀ dy, added to `onto`, as if it were made first."""
    ends, rows, shape = jnp.cumsum(sizes), x.shape[0], (x.shape[1], dy.shape[1])

    def group(g: Any, out: Any) -> Any:
        def tile(total: Any, first: Any, own: Any) -> Any:
            a = lax.dynamic_slice(x, (first, 0), (own.shape[0], shape[0]))
            b = lax.dynamic_slice(dy, (first, 0), (own.shape[0], shape[1]))
            return total + lax.dot_general(
                *factors(a, jnp.where(own, b, 0)),
                (((0,), (0,)), ((), ())),
                preferred_element_type=_sums(x.dtype),
            )

        total = _tiles(ends[g], sizes[g], rows, jnp.zeros(shape, _sums(x.dtype)), tile)
        here = lax.dynamic_index_in_dim(out, g, keepdims=False)
        new = widen(here) + widen(total.astype(x.dtype))
        return lax.dynamic_update_index_in_dim(out, new.astype(out.dtype), g, 0)

    return lax.fori_loop(0, sizes.shape[0] if rows else 0, group, onto)


def _sums(dtype: Any) -> Any:
    """The type that products of a type are added up in."""
    return jnp.promote_types(dtype, jnp.float32)


# ---- one kernel for plans -----------------------------------------------------------------------
def _product_flops(shapes: Shapes) -> int:
    """FLOPs by the rows, whatever the number of groups."""
    return 2 * shapes[0][0] * math.prod(shapes[1][1:])


def _outer_flops(shapes: Shapes) -> int:
    return 2 * shapes[0][0] * shapes[0][1] * shapes[1][1]


_FLOPS = {grouped_product: _product_flops, grouped_outer: _outer_flops}


@cache
def _kernel(function: Callable[..., Any], usual: int | None) -> Callable[..., Any]:
    """A function as plans take it for a kernel, whose operations go by the usual number of rows."""

    @wraps(function)
    def kernel(*operands: Any) -> Any:
        return function(*operands)

    def flops(shapes: Shapes) -> int:
        (rows, *features), *others = shapes
        return _FLOPS[function]([(rows if usual is None else usual, *features), *others])

    kernel.__name__ += "" if usual is None else f"_of_{usual}"
    KERNELS[kernel.__name__] = flops
    return jax.jit(kernel, static_argnums=3 if function is grouped_product else ())


# ---- the ops ------------------------------------------------------------------------------------
def _grouped_matmul(
    x: Any, matrices: Any, sizes: Any, transpose: bool, usual: int | None = None
) -> Any:
    apart = _apart(matrices, sizes)
    _check(x, apart, sizes, 2 if transpose else 1)
    return _kernel(grouped_product, usual)(x, apart, sizes, transpose)


def _outer(x: Any, dy: Any, sizes: Any, joined: bool, usual: int | None = None) -> Any:
    shape = (*sizes.shape, x.shape[1], dy.shape[1])
    out = _kernel(grouped_outer, usual)(x, dy, sizes, jnp.zeros(shape, x.dtype))
    return out.reshape(-1, shape[-1]) if joined else out


def _outer_onto(t: Any, x: Any, dy: Any, sizes: Any, joined: bool, usual: int | None = None) -> Any:
    return _kernel(grouped_outer, usual)(x, dy, sizes, _apart(t, sizes)).reshape(t.shape)


_OUTER = define(
    "grouped_outer_product",
    _outer,
    onto=_outer_onto,
    grad=NoGrad("second derivatives of grouped products are not supported"),
)


def _grad(ctx: Any, op: Op, dy: Tensor) -> list[Tensor | None]:
    x, matrices, sizes = op.inputs
    groups, transpose = ctx.fwd(sizes), op.attrs["transpose"]
    usual = {n: x for n, x in op.attrs.items() if n == "usual"}
    dx = dm = None
    if ctx.needs(op, 0):
        attrs = {"transpose": not transpose, **usual}
        dx = emit(_GROUPED_MATMUL, [dy, ctx.fwd(matrices), groups], attrs)[0]
    if ctx.needs(op, 1):
        pair = [dy, ctx.fwd(x)] if transpose else [ctx.fwd(x), dy]
        dm = emit(_OUTER, [*pair, groups], {"joined": matrices.rank == 2, **usual})[0]
    return [dx, dm, None]


_GROUPED_MATMUL = define("grouped_matmul", _grouped_matmul, grad=_grad)


def grouped_matmul(
    x: Tensor,
    matrices: Tensor,
    sizes: Tensor,
    transpose: bool = False,
    usual: int | None = None,
) -> Tensor:
    """Multiply rows, which are sorted by group, with the matrix of their group.

    Args:
        x: (rows, in).
        matrices: (groups, in, out), or one after the other, (groups × in, out), of the dtype of
            `x`. Half types accumulate in float32.
        sizes: int32 (groups,), how many rows each group has, at most all together. Rows that
            belong to no group give zeros.
        transpose: the matrices are (out, in).
        usual: how many rows plans think that groups have; None: all.

    Returns:
        (rows, out). Work and memory go by the rows, whatever the number of groups.

    Raises:
        SpecError: the shapes do not fit.
    """
    attrs: dict[str, Any] = {"transpose": bool(transpose)}
    if usual is not None:
        attrs["usual"] = usual
    return emit(_GROUPED_MATMUL, [x, matrices, sizes], attrs)[0]
