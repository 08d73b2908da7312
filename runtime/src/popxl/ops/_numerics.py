"""Precision rules shared by the meanings of ops.

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


def widen(x: Any) -> Any:
    """`x` in float32 if it is float16 or bfloat16, otherwise unchanged."""
    return x.astype(jnp.float32) if x.dtype in _HALVES else x


def product_operands(*operands: Any) -> tuple[Any, ...]:
    """Operands of a product accumulated in float32. XLA's CPU backend widens halves itself,
    but has faster products for what is float32 (see `popxl._devices.cpu.compiler_options_for`)."""
    return tuple(map(widen, operands)) if traced_platform() == "cpu" else operands


def accumulation_dtype(dtype: Any, result_dtype: Any) -> Any:
    """`preferred_element_type` of a product of operands of `dtype` with result `result_dtype`;
    None: JAX's default.

    Sums of halves are in float32. Where the device's products round these as they write them, they
    give the half type at once: a result in float32 costs twice the memory traffic, and a kernel
    that converts it. XLA's CPU backend would round partial sums.
    """
    if dtype not in _HALVES:
        return None
    return (
        result_dtype if result_dtype == dtype and traced_platform() in _ROUNDS_ONCE else jnp.float32
    )


def round_between_ops(x: Any) -> Any:
    """`x` with the precision of its type. XLA may keep that of float32 between two ops of a half
    type; this is for results that are defined by their roundings."""
    # In float32, since a reduction to the precision that a type has anyway is taken out.
    return round_to_dtype_range(x.dtype, widen(x)).astype(x.dtype)


def round_to_dtype_range(dtype: Any, wide: Any) -> Any:
    """Round float32 to the values of a narrower type, subnormals included."""
    info, exponents = jnp.finfo(dtype), jnp.finfo(wide.dtype).nexp
    kept = lax.reduce_precision(wide, exponents, info.nmant)
    if info.nexp == exponents:
        return kept
    # XLA would do the same for fewer exponents, in ten operations more on CPUs, and without
    # subnormal numbers. Those are multiples of one number, as float32 is near this sum.
    size, near = jnp.abs(kept), 0.75 * 2.0**24 * float(info.smallest_subnormal)
    kept = jnp.where(size < info.tiny, (wide + near) - near, kept)
    return jnp.where(size > info.max, kept * jnp.inf, kept)


def product_precision(*operands: Any) -> lax.Precision | None:
    """Precision of a matrix product: float32 stays float32. By default JAX would round it first, on
    GPUs to TF32 and on TPUs to bfloat16. `JAX_DEFAULT_MATMUL_PRECISION`, where it is set, decides
    instead."""
    if jax.config.jax_default_matmul_precision is not None:
        return None
    exact = any(x.dtype == jnp.float32 for x in operands)
    return lax.Precision.HIGHEST if exact else None


def is_float8(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1


def check_floating(x: Any) -> None:
    """Raise TypeError unless `x` has a floating-point type that arithmetic is defined for."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"it takes floating-point tensors, not {x.dtype}: use ops.cast first")
    check_arithmetic(x)


def check_number(x: Any) -> None:
    """Raise TypeError unless `x` has a type that arithmetic is defined for."""
    if x.dtype.kind == "b":
        raise TypeError("it takes tensors of numbers, not bool: use ops.cast first")
    check_arithmetic(x)


def check_arithmetic(x: Any) -> None:
    """Raise TypeError for float8, which only casts, matmul and conv take."""
    if is_float8(x):
        raise TypeError("float8 takes no arithmetic: use ops.pow2scale_cast_from_fp8 first")


def check_elements(x: Any, axes: int | Iterable[int]) -> None:
    """Raise ValueError where there is no element to choose along the axes."""
    given = [axes] if isinstance(axes, int) else list(axes)
    if not all(x.shape[axis] for axis in given):
        raise ValueError(f"it needs at least one element along axis {given} of shape {x.shape}")


def check_same_dtype(*arrays: Any) -> None:
    """Raise TypeError unless all arrays have one dtype."""
    if len({x.dtype for x in arrays}) > 1:
        names = ", ".join(str(x.dtype) for x in arrays)
        raise TypeError(f"the inputs must have one dtype, not {names}: use ops.cast")


def number_op(fn: Lowering) -> Lowering:
    """`fn` on any numeric arrays, without a change of the first one's dtype."""

    def lower(x: Any, *others_: Any, **attrs: Any) -> Any:
        check_arithmetic(x)
        return fn(x, *others_, **attrs).astype(x.dtype)

    return lower


def float_op(fn: Lowering) -> Lowering:
    """`fn` on floating-point arrays, computed in float32 for half types, rounded once."""

    def lower(x: Any, *others_: Any, **attrs: Any) -> Any:
        check_floating(x)
        return fn(widen(x), *map(widen, others_), **attrs).astype(x.dtype)

    return lower
