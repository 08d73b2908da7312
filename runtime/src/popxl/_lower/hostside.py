"""Whole numbers that the host knows: counters of loops, offsets into buffers, conditions.

An op of whole numbers is computed on the host where its inputs are known there, by what it means to
JAX: its lowering is traced once, and the few primitives that index arithmetic consists of are
evaluated with numpy. Such values have one element, and are Python ints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from popxl._core.infer import freeze
from popxl.dtypes import dtype
from popxl.tensor import Constant

if TYPE_CHECKING:
    from popxl._core.op import Op
    from popxl.tensor import Tensor, TensorSpec

Rule = Callable[..., tuple[int, ...]]


def is_host_kind(spec: TensorSpec) -> bool:
    """Whether a value of that spec can be one that the host computes."""
    return math.prod(spec.shape) == 1 and np.dtype(spec.dtype.as_jax()).kind in "iub"


def host_constant(t: Tensor) -> int | None:
    """The number that a constant holds; None if it is no constant, or no number."""
    return int(t._data.item()) if isinstance(t, Constant) and is_host_kind(t.spec) else None


def host_rule(op: Op) -> Rule | None:
    """A function from the op's inputs to its outputs as ints; None if the host has none."""
    if op.defn.lower is None or op.inplace is not None or op.view or not op.inputs:
        return None
    if not all(is_host_kind(t.spec) for t in (*op.inputs, *op.outputs)):
        return None
    specs = tuple((t.shape, t.dtype) for t in op.inputs)
    key = (op.defn, specs, freeze(op.attrs))
    if key not in _RULES:
        _RULES[key] = _rule(op, specs)
    return _RULES[key]


_RULES: dict[Any, Rule | None] = {}


def _rule(op: Op, specs: Sequence[tuple[tuple[int, ...], dtype]]) -> Rule | None:
    lower, attrs = op.defn.lower, op.attrs
    assert lower is not None

    def flat(*xs: Any) -> Any:
        out = lower(*xs, **attrs)
        return out if isinstance(out, (tuple, list)) else [out]

    try:
        closed = jax.make_jaxpr(flat)(*(jax.ShapeDtypeStruct(s, d.as_jax()) for s, d in specs))
    except Exception:  # it needs a mesh, or more than abstract values: not index arithmetic
        return None
    if not _supported(closed.jaxpr):
        return None

    @lru_cache(maxsize=2**16)
    def rule(*numbers: int) -> tuple[int, ...]:
        inputs = [
            np.full(shape, n, d.as_jax()) for n, (shape, d) in zip(numbers, specs, strict=True)
        ]
        with np.errstate(all="ignore"):  # whole numbers wrap around, as on the device
            return tuple(int(x.item()) for x in _evaluate(closed.jaxpr, closed.consts, inputs))

    return rule


def _divide(x: Any, y: Any) -> Any:
    """Division towards zero, as XLA does; by zero: -1."""
    safe = np.where(y == 0, 1, y)
    whole = np.asarray(np.sign(x) * np.sign(safe) * (np.abs(x) // np.abs(safe)), x.dtype)
    return np.where(y == 0, np.asarray(-1).astype(x.dtype), whole)


_PRIMITIVES: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": _divide,
    "rem": lambda x, y: np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y))),
    "neg": lambda x: -x,
    "abs": np.abs,
    "sign": np.sign,
    "max": np.maximum,
    "min": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x: ~x,
    "select_n": lambda which, *cases: cases[int(which.item())],
    "convert_element_type": lambda x, new_dtype, **_: x.astype(new_dtype),
    "reshape": lambda x, new_sizes, **_: x.reshape(new_sizes),
    "broadcast_in_dim": lambda x, shape, **_: x.reshape(shape),
    "squeeze": lambda x, dimensions: np.squeeze(x, tuple(dimensions)),
    "copy": lambda x: x,
    "stop_gradient": lambda x: x,
}
_CALLS = ("pjit", "jit", "closed_call", "custom_jvp_call", "custom_vjp_call")


def _inner(eqn: Any) -> Any:
    return eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]


def _supported(jaxpr: Any) -> bool:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _CALLS:
            if not _supported(_inner(eqn).jaxpr):
                return False
        elif eqn.primitive.name not in _PRIMITIVES:
            return False
        if any(v.aval.size != 1 or np.dtype(v.aval.dtype).kind not in "iub" for v in eqn.outvars):
            return False
    return True


def _evaluate(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    values = dict(zip(jaxpr.invars, inputs, strict=True))
    values.update(zip(jaxpr.constvars, map(np.asarray, consts), strict=True))

    def read(v: Any) -> Any:
        return np.asarray(v.val, v.aval.dtype) if hasattr(v, "val") else values[v]

    for eqn in jaxpr.eqns:
        arguments = [read(v) for v in eqn.invars]
        if eqn.primitive.name in _CALLS:
            inner = _inner(eqn)
            results = _evaluate(inner.jaxpr, inner.consts, arguments)
        else:
            found = _PRIMITIVES[eqn.primitive.name](*arguments, **_parameters(eqn))
            results = [np.asarray(found).astype(eqn.outvars[0].aval.dtype)]
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _parameters(eqn: Any) -> dict[str, Any]:
    """Parameters of the primitives whose result depends on them."""
    wanted = ("new_dtype", "new_sizes", "shape", "dimensions")
    return {k: v for k, v in eqn.params.items() if k in wanted}
