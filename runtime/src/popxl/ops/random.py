"""Random numbers and dropout.

All of them are functions of a seed tensor (uint32 of shape (2,), see `popxl.create_seeds`), the
shape and the parameters: the same seed gives the same numbers on every device and replica, and
when a forward pass is recomputed. The generator is Threefry-2x32 (Salmon et al., 2011).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from popxl import dtypes
from popxl._ir.op_registry import NoGrad, define
from popxl.ops._emit import emit
from popxl.ops._numerics import check_floating, upcast_half_types
from popxl.tensor import Tensor

_NO_GRAD = NoGrad("random numbers are no differentiable function of the seed")


def _threefry_key(seed: Any) -> Any:
    if seed.dtype != jnp.uint32 or seed.shape != (2,):
        raise TypeError(f"a seed must be uint32 of shape (2,), not {seed.dtype} of {seed.shape}")
    return jax.random.wrap_key_data(seed, impl="threefry2x32")


def random_bits(seed: Any, shape: tuple[int, ...], stream: Any = 0) -> Any:
    """Returns random uint32 of `shape`; streams with different numbers are independent.

    XLA's own Threefry, with the seed as key and a counter from stream * 2^32, and not
    `jax.random.bits`: it is one op, which compiles and runs about 2.5 times as fast on CPU. The
    algorithm is named, since the default differs between platforms.
    """
    _threefry_key(seed)  # checks it
    counter = [jnp.zeros((), jnp.uint32), jnp.asarray(stream, jnp.uint32)]
    state = jnp.concatenate([seed, jnp.stack(counter)])
    threefry = lax.RandomAlgorithm.RNG_THREE_FRY
    return lax.rng_bit_generator(state, shape, jnp.uint32, algorithm=threefry)[1]


# ---- seeds --------------------------------------------------------------------------------------
def _split_seed(seed: Any, n: int) -> tuple[Any, ...]:
    children = jax.random.key_data(jax.random.split(_threefry_key(seed), n))
    return tuple(children[i] for i in range(n))


_SPLIT = define("split_random_seed", _split_seed, grad=_NO_GRAD)


def split_random_seed(seed: Tensor, n: int = 2) -> tuple[Tensor, ...]:
    """Makes `n` independent random seeds from one, which must not be used again.

    Args:
        seed: uint32 of shape (2,).

    Returns:
        `n` tensors, uint32 of shape (2,).
    """
    if n < 1:
        raise ValueError(f"split_random_seed: n must be at least 1, but is {n}")
    return emit(_SPLIT, [seed], {"n": int(n)})


def _create_seed(seed: Any, modifier: Any) -> Any:
    key = _threefry_key(seed)
    for value in modifier.astype(jnp.uint32).reshape(-1):
        key = jax.random.fold_in(key, value)
    return jax.random.key_data(key)


_CREATE = define("create_random_seed", _create_seed, grad=_NO_GRAD, result="modified_seed")


def create_random_seed(seed: Tensor, modifier: Tensor) -> Tensor:
    """Makes a random seed from a seed and integers, such as a step number or an index.

    Args:
        seed: uint32 of shape (2,).
        modifier: integers of any small shape, mixed in one after the other.
    """
    return emit(_CREATE, [seed, modifier])[0]


# ---- numbers ------------------------------------------------------------------------------------
def _uniform(
    seed: Any, shape: tuple[int, ...], low: float, high: float, dtype: dtypes.dtype
) -> Any:
    unit = jax.random.uniform(_threefry_key(seed), shape, jnp.float32)
    return (low + unit * (high - low)).astype(dtype.as_jax())


_UNIFORM = define("random_uniform", _uniform, grad=_NO_GRAD)


def random_uniform(
    seed_tensor: Tensor,
    shape: Iterable[int],
    low: float = 0.0,
    high: float = 1.0,
    dtype: dtypes.dtype = dtypes.float32,
) -> Tensor:
    """Returns random numbers, uniform over [low, high).

    Args:
        seed_tensor: uint32 of shape (2,).
        dtype: a float dtype; drawn in float32 and rounded to it (which may give `high`).
    """
    attrs = {"shape": tuple(shape), "low": float(low), "high": float(high), "dtype": dtype}
    return emit(_UNIFORM, [seed_tensor], attrs)[0]


def _normal(seed: Any, shape: tuple[int, ...], mean: float, std: float, dtype: dtypes.dtype) -> Any:
    unit = jax.random.normal(_threefry_key(seed), shape, jnp.float32)
    return (mean + unit * std).astype(dtype.as_jax())


_NORMAL = define("random_normal", _normal, grad=_NO_GRAD)


def random_normal(
    seed_tensor: Tensor,
    shape: Iterable[int],
    mean: float = 0.0,
    std: float = 1.0,
    dtype: dtypes.dtype = dtypes.float32,
) -> Tensor:
    """Returns random numbers from a normal distribution.

    Args:
        seed_tensor: uint32 of shape (2,).
        dtype: a float dtype; drawn in float32 and rounded to it.
    """
    attrs = {"shape": tuple(shape), "mean": float(mean), "std": float(std), "dtype": dtype}
    return emit(_NORMAL, [seed_tensor], attrs)[0]


# ---- dropout ------------------------------------------------------------------------------------
def dropout_of_array(x: Any, seed: Any, shape: tuple[int, ...], p: float) -> Any:
    """Drops elements by a mask broadcast from `shape` (the lowering of `shaped_dropout`)."""
    check_floating(x)
    if jnp.broadcast_shapes(shape, x.shape) != x.shape:
        raise ValueError(f"mask of shape {shape} does not broadcast to {x.shape}")
    if p == 0:
        return x
    threshold = min(round((1 - p) * 2**32), 2**32 - 1)
    keep = random_bits(seed, shape) < jnp.uint32(threshold)
    scaled = (upcast_half_types(x) * (1 / (1 - p))).astype(x.dtype)
    return jnp.where(keep, scaled, jnp.zeros((), x.dtype))


def _dropout_grad(ctx: Any, op: Any, dy: Tensor) -> list[Tensor | None]:
    """Applies the forward pass's dropout mask, from the same seed, to the gradient."""
    return [emit(_DROPOUT, [dy, ctx.fwd(op.inputs[1])], op.attrs)[0], None]


_DROPOUT = define("dropout", dropout_of_array, grad=_dropout_grad, tags=("elementwise",))


def dropout(t: Tensor, seed_tensor: Tensor, p: float) -> Tensor:
    """Sets elements to 0 with probability `p` and scales the others by 1 / (1 - p).

    Args:
        seed_tensor: uint32 of shape (2,); it alone decides, with the shape, which elements go.

    Raises:
        ValueError: `p` is not in [0, 1).
    """
    return shaped_dropout(t, seed_tensor, t.shape, p)


def shaped_dropout(t: Tensor, seed_tensor: Tensor, shape: Iterable[int], ratio: float) -> Tensor:
    """Dropout with a mask of `shape`, broadcast to `t`: drops whole rows, channels or heads.

    Raises:
        ValueError: `ratio` is not in [0, 1).
    """
    if not 0 <= ratio < 1:
        raise ValueError(f"dropout: the probability for {t.id!r} must be in [0, 1), not {ratio}")
    attrs = {"shape": tuple(shape), "p": float(ratio)}
    return emit(_DROPOUT, [t, seed_tensor], attrs)[0]
