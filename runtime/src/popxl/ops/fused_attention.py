"""Fused attention, which never materializes the whole score matrix.

On NVIDIA GPUs it is cuDNN's kernel (`_cudnn_attention`); elsewhere, and for what that does not
compute, a loop over tiles of the queries. Either way the gradient computes the scores again, from
queries and keys (Dao et al., FlashAttention, arXiv:2205.14135); cuDNN's takes the sums of their
exponentials from the forward pass.

Of four axes, the output has tokens before heads, as cuDNN writes it and projections read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from popxl._ir.op import Op
from popxl._ir.op_registry import NoGrad, define
from popxl.ops._attention_checks import check_inputs
from popxl.ops._attention_math import (
    AttentionAttrs,
    attention_grads,
    attention_with_weights,
    group_extra_inputs,
)
from popxl.ops._cudnn_attention import (
    attention_grads_kernel,
    attention_kernel,
    is_supported,
    kernel_name_suffix,
)
from popxl.ops._cudnn_kernels import is_installed
from popxl.ops._emit import emit
from popxl.ops.shape import transpose
from popxl.tensor import Tensor

TILE = 128
"""Queries of a tile. It is a constant, so that dropout's masks depend on no layout."""

_QUERIES = -2


# ---- tiles --------------------------------------------------------------------------------------
def _split_into_tiles(t: Any, axis: int) -> Any:
    """Splits an axis into tiles, the last padded with zeros: (tiles, ..., TILE, ...)."""
    axis %= t.ndim
    padding = -t.shape[axis] % TILE
    t = jnp.pad(t, [(0, padding if a == axis else 0) for a in range(t.ndim)])
    tiled = t.reshape(*t.shape[:axis], -1, TILE, *t.shape[axis + 1 :])
    return jnp.moveaxis(tiled, axis, 0)


def _join_tiles(tiles: Any, axis: int, length: int) -> Any:
    """Joins tiles along an axis: the inverse of `_split_into_tiles`."""
    axis %= tiles.ndim - 1
    untiled = jnp.moveaxis(tiles, 0, axis)
    untiled = untiled.reshape(*untiled.shape[:axis], -1, *untiled.shape[axis + 2 :])
    return lax.slice_in_dim(untiled, 0, length, axis=axis)


class _QueryTiles:
    """Attention inputs, sliced for one tile of queries at a time.

    Attributes:
        settings: those of attention in a tile, where queries have their own positions.
        moving: for each bias, and sinks, whether it has an axis of the queries, and is cut too.
        xs: what is cut: the tiles' numbers, queries, biases, positions and segments.
    """

    def __init__(self, q: Any, k: Any, extra: Sequence[Any], settings: AttentionAttrs) -> None:
        self.extra_inputs = group_extra_inputs(extra, settings)
        queries, keys = q.shape[_QUERIES], k.shape[_QUERIES]
        positions = self.extra_inputs.positions
        if settings.compares_positions and not positions:
            positions = [jnp.arange(n) for n in (queries, keys)]
        self.settings = settings._replace(positions=settings.compares_positions)
        floats = self.extra_inputs.floats
        self.moving = [b.ndim > 1 and b.shape[_QUERIES] == queries > 1 for b in floats]
        self._position_ids = [*positions, *self.extra_inputs.segments]
        tiled = [b for b, moves in zip(floats, self.moving, strict=True) if moves]
        self.xs = (
            jnp.arange(-(-queries // TILE), dtype=jnp.uint32),
            _split_into_tiles(q, _QUERIES),
            [_split_into_tiles(b, _QUERIES) for b in tiled],
            [_split_into_tiles(position_ids, -1) for position_ids in self._position_ids[::2]],
        )

    def inputs_of_tile(
        self, tile_index: Any, biases: Sequence[Any], position_ids: Sequence[Any]
    ) -> list[Any]:
        """Returns the attention inputs after q, k and v for one tile of queries."""
        tiled, extra_inputs = iter(biases), self.extra_inputs
        pairs = zip(self.moving, extra_inputs.floats, strict=True)
        inputs = [next(tiled) if moves else bias for moves, bias in pairs]
        for of_queries, of_keys in zip(position_ids, self._position_ids[1::2], strict=True):
            inputs += [of_queries, of_keys]
        return [
            *inputs,
            *extra_inputs.lengths,
            *(_tile_seed(seed, tile_index) for seed in extra_inputs.seed),
        ]


def _tile_seed(seed: Any, tile_index: Any) -> Any:
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(key, tile_index))


def _attend_by_tiles(
    q: Any, k: Any, v: Any, *extra: Any, settings: AttentionAttrs
) -> tuple[Any, Any]:
    tiles = _QueryTiles(q, k, extra, settings)

    def attend_tile(xs: Any) -> Any:
        number, q_tile, biases, position_ids = xs
        extra = tiles.inputs_of_tile(number, biases, position_ids)
        return attention_with_weights(q_tile, k, v, *extra, settings=tiles.settings)[0]

    out = _join_tiles(lax.map(attend_tile, tiles.xs), _QUERIES, q.shape[_QUERIES])
    return _swap_heads_of_array(out), jnp.zeros(q.shape[:-1], jnp.float32)


def _swap_heads_of_array(t: Any) -> Any:
    """Swaps heads and tokens, if there are both: (b, h, n, d) -> (b, n, h, d), and back."""
    return jnp.swapaxes(t, 1, 2) if t.ndim == 4 else t


def _grads_by_tiles(
    dy: Any, q: Any, k: Any, v: Any, out: Any, _: Any, *extra: Any, settings: AttentionAttrs
) -> tuple[Any, ...]:
    """Returns gradients of q, k, v, each bias and sinks, with float32 sums over tiles."""
    dy, out = map(_swap_heads_of_array, (dy, out))
    tiles = _QueryTiles(q, k, extra, settings)
    floats, inner = tiles.extra_inputs.floats, tiles.settings
    still = [b for b, moves in zip(floats, tiles.moving, strict=True) if not moves]

    def grads_of_tile(sums: Any, xs: Any) -> tuple[Any, Any]:
        (number, q_tile, tiled, position_ids), dy, out = xs
        extra = tiles.inputs_of_tile(number, tiled, position_ids)
        _, *residuals = attention_with_weights(q_tile, k, v, *extra, settings=inner)
        seed = group_extra_inputs(extra, inner).seed
        dq, dk, dv, ds, *d_sinks = attention_grads(
            dy, q_tile, k, v, out, *residuals, *seed,
            scale=inner.scale, p=inner.p, cap=inner.cap, sinks=inner.sinks,
        )  # fmt: skip
        new = (
            dk,
            dv,
            [*(_sum_to(ds, b.shape) for b in still[: len(still) - len(d_sinks)]), *d_sinks],
        )
        return jax.tree.map(jnp.add, sums, new), (dq, [_sum_to(ds, b.shape) for b in tiled])

    start = jax.tree.map(lambda t: jnp.zeros(t.shape, jnp.float32), (k, v, still))
    outer = _split_into_tiles(dy, _QUERIES), _split_into_tiles(out, _QUERIES)
    (dk, dv, untiled), (dq, tiled) = lax.scan(grads_of_tile, start, (tiles.xs, *outer))
    queries = q.shape[_QUERIES]
    tiled_grads, untiled_grads = (_join_tiles(c, _QUERIES, queries) for c in tiled), iter(untiled)
    d_floats = [next(tiled_grads) if moves else next(untiled_grads) for moves in tiles.moving]
    d_floats = [d.astype(b.dtype) for d, b in zip(d_floats, floats, strict=True)]
    return _join_tiles(dq, _QUERIES, queries), dk.astype(k.dtype), dv.astype(v.dtype), *d_floats


def _sum_to(ds: Any, shape: tuple[int, ...]) -> Any:
    """Sums the scores' gradient `ds` over broadcast axes to `shape`, in float32."""
    extra = ds.ndim - len(shape)
    axes = [*range(extra), *(extra + i for i, n in enumerate(shape) if n == 1)]
    return ds.astype(jnp.float32).sum(axes, keepdims=True).reshape(shape)


# ---- the op -------------------------------------------------------------------------------------
def _run_cudnn_or_tiles(
    kernel: Callable[..., Any],
    tiles: Callable[..., Any],
    settings: AttentionAttrs,
    *inputs: Any,
) -> Any:
    """Runs cuDNN's attention `kernel` under its name; `tiles` where cuDNN does not support it.

    JAX can also refuse the kernel at tracing: it asks the local device and its cuDNN, and a plan
    can be for another machine.

    Args:
        inputs: the op's, from q on for the forward pass, else from the output's gradient on.
    """
    forward = kernel is attention_kernel
    (q, k, v), extra = (inputs[:3], inputs[3:]) if forward else (inputs[1:4], inputs[6:])
    if not is_supported(q, k, v, extra, settings):
        return tiles(*inputs, settings=settings)

    def named_kernel(*args: Any) -> Any:
        if is_installed():
            with suppress(NotImplementedError):
                return kernel(*args, settings=settings)
        return tiles(*args, settings=settings)

    named_kernel.__name__ = kernel.__name__ + kernel_name_suffix(settings)
    return jax.jit(named_kernel)(*inputs)


def _attention(q: Any, k: Any, v: Any, *extra: Any, **attrs: Any) -> tuple[Any, Any]:
    """Returns attention's output, and statistics for its gradient: zeros where it takes none."""
    settings = AttentionAttrs(**attrs)
    check_inputs(q, k, v, group_extra_inputs(extra, settings))
    found: tuple[Any, Any] = _run_cudnn_or_tiles(
        attention_kernel, _attend_by_tiles, settings, q, k, v, *extra
    )
    return found


def _grads(*inputs: Any, **attrs: Any) -> tuple[Any, ...]:
    """Returns the gradients of attention's q, k, v, each bias and sinks.

    Args:
        inputs: the output's gradient, q, k, v, both outputs, and the op's other inputs.
    """
    grads: tuple[Any, ...] = _run_cudnn_or_tiles(
        attention_grads_kernel, _grads_by_tiles, AttentionAttrs(**attrs), *inputs
    )
    return grads


_GRADS = define(
    "fused_attention_grads",
    _grads,
    grad=NoGrad("second derivatives of attention are not supported"),
)


def _grad(ctx: Any, op: Op, dy: Tensor, *_: Any) -> list[Tensor | None]:
    q, k, v, *extra = map(ctx.fwd, op.inputs)
    grads = emit(_GRADS, [dy, q, k, v, *map(ctx.fwd, op.outputs), *extra], dict(op.attrs))
    needed = [g if ctx.needs(op, i) else None for i, g in enumerate(grads)]
    return needed + [None] * (len(op.inputs) - len(grads))


FUSED_ATTENTION = define(
    "fused_attention",
    _attention,
    grad=_grad,
)


def swap_heads(out: Tensor) -> Tensor:
    """Returns the output of fused attention with heads before tokens, as q has them."""
    return transpose(out, (0, 2, 1, 3)) if out.rank == 4 else out
