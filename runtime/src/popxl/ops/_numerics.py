"""Precision rules and dtype checks shared by the lowerings of ops.

Float16 and bfloat16 are storage types: sums, norms and transcendental functions are computed in
float32 and rounded once. No op converts types on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from popxl.ops._reductions import traced_platform

Lowering = Callable[..., Any]

_HALVES = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
_ROUNDS_ONCE = ("gpu", "cuda", "tpu")  # the sums of a product, when all are added


def upcast_half_types(x: Any) -> Any:
    """Casts float16 and bfloat16 arrays to float32; returns other arrays unchanged."""
    return x.astype(jnp.float32) if x.dtype in _HALVES else x


def matmul_operands(*operands: Any) -> tuple[Any, ...]:
    """Returns matmul operands in the dtype that is fastest with float32 accumulation.

    XLA's CPU backend widens halves itself, but has faster products for what is float32 (see
    `popxl._devices.cpu.compiler_options_for`).
    """
    return tuple(map(upcast_half_types, operands)) if traced_platform() == "cpu" else operands


def accumulation_dtype(dtype: Any, result_dtype: Any) -> Any:
    """Returns a matmul's `preferred_element_type` for accumulation; None is JAX's default.

    `dtype` is that of the operands.

    Sums of halves are in float32. Where the device's products round these as they write them, they
    give the half type at once: a result in float32 costs twice the memory traffic, and a kernel
    that converts it. XLA's CPU backend would round partial sums.
    """
    if dtype not in _HALVES:
        return None
    return (
        result_dtype if result_dtype == dtype and traced_platform() in _ROUNDS_ONCE else jnp.float32
    )


def round_to_narrow_float(dtype: Any, wide: Any) -> Any:
    """Rounds float32 to the values of a narrower float type, subnormals included."""
    info, exponents = jnp.finfo(dtype), jnp.finfo(wide.dtype).nexp
    kept = lax.reduce_precision(wide, exponents, info.nmant)
    if info.nexp == exponents:
        return kept
    # XLA would do the same for fewer exponents, in ten operations more on CPUs, and without
    # subnormal numbers. Those are multiples of one number, as float32 is near this sum.
    size, near = jnp.abs(kept), 0.75 * 2.0**24 * float(info.smallest_subnormal)
    kept = jnp.where(size < info.tiny, (wide + near) - near, kept)
    return jnp.where(size > info.max, kept * jnp.inf, kept)


def matmul_precision(*operands: Any) -> lax.Precision | None:
    """Returns the JAX precision of a matmul, which keeps float32 operands in float32.

    By default JAX would round them first, on GPUs to TF32 and on TPUs to bfloat16.
    `JAX_DEFAULT_MATMUL_PRECISION`, where it is set, decides instead.
    """
    if jax.config.jax_default_matmul_precision is not None:
        return None
    exact = any(x.dtype == jnp.float32 for x in operands)
    return lax.Precision.HIGHEST if exact else None


def is_float8(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1


def check_floating(x: Any) -> None:
    """Raises TypeError unless `x` has a floating-point type with arithmetic (float8 has none)."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"it takes floating-point tensors, not {x.dtype}: use ops.cast first")
    check_arithmetic(x)


def check_number(x: Any) -> None:
    """Raises TypeError unless `x` has a numeric type with arithmetic."""
    if x.dtype.kind == "b":
        raise TypeError("it takes tensors of numbers, not bool: use ops.cast first")
    check_arithmetic(x)


def check_arithmetic(x: Any) -> None:
    """Raises TypeError for float8, which only casts, matmul and conv accept."""
    if is_float8(x):
        raise TypeError("float8 takes no arithmetic: use ops.pow2scale_cast_from_fp8 first")


def check_not_empty(x: Any, axes: int | Iterable[int]) -> None:
    """Raises ValueError if an argmax or maximum would reduce axes without elements."""
    given = [axes] if isinstance(axes, int) else list(axes)
    if not all(x.shape[axis] for axis in given):
        raise ValueError(f"it needs at least one element along axis {given} of shape {x.shape}")


def check_same_dtype(*arrays: Any) -> None:
    """Raises TypeError unless all arrays have one dtype."""
    if len({x.dtype for x in arrays}) > 1:
        names = ", ".join(str(x.dtype) for x in arrays)
        raise TypeError(f"the inputs must have one dtype, not {names}: use ops.cast")


def number_op(fn: Lowering) -> Lowering:
    """Decorates an op's lowering on numeric arrays; the result has the first array's dtype."""

    def lower(x: Any, *others_: Any, **attrs: Any) -> Any:
        check_arithmetic(x)
        return fn(x, *others_, **attrs).astype(x.dtype)

    return lower


def float_op(fn: Lowering) -> Lowering:
    """Decorates an op's lowering on floats: half types are computed in float32, rounded once."""

    def lower(x: Any, *others_: Any, **attrs: Any) -> Any:
        check_floating(x)
        return fn(upcast_half_types(x), *map(upcast_half_types, others_), **attrs).astype(x.dtype)

    return lower
