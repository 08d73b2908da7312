"""Shape and dtype inference of ops, with errors that name the op and the user's line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from popxl import dtypes
from popxl._analysis.memo import get_cached
from popxl._ir.sharding import common_meta_shape
from popxl.errors import SpecError
from popxl.replica_grouping import ReplicaGrouping

if TYPE_CHECKING:
    from popxl._ir.op import Op
    from popxl.tensor import TensorSpec

_CACHE: dict[Any, tuple[Any, ...]] = {}


def describe_op(op: Op) -> str:
    """Formats an op for error messages: `name(x: float32[2, 3], ...) at file:line`."""
    args = ", ".join(f"{t.name}: {t.dtype.name}{list(t.shape)}" for t in op.inputs)
    return f"{op.name}({args}) at {op.location}"


def infer_specs(op: Op) -> Sequence[TensorSpec]:
    """Returns the specs of the outputs of `op`; raises SpecError with op, inputs and location."""
    defn = op.defn
    if defn.dtypes == "same" and len({t.dtype for t in op.inputs}) > 1:
        raise SpecError(
            f"{describe_op(op)}: the inputs must have one dtype; there is no implicit conversion, "
            "use ops.cast"
        )
    rule = defn.infer or infer_by_tracing(op)
    try:
        specs = list(rule(*(t.spec for t in op.inputs), **op.attrs))
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        from popxl._analysis.printing import first_error_line

        raise SpecError(f"{describe_op(op)}: {first_error_line(error)}") from error
    _check_inplace(op, specs)
    return specs


def _check_inplace(op: Op, specs: Sequence[TensorSpec]) -> None:
    if op.inplace is None:
        return
    target = op.inputs[op.inplace]
    if (specs[0].shape, specs[0].dtype) != (target.shape, target.dtype):
        raise SpecError(
            f"{describe_op(op)}: the result {specs[0].dtype.name}{list(specs[0].shape)} cannot be "
            f"written in place to {target.name!r}"
        )


def infer_by_tracing(op: Op) -> Any:
    """Infers the specs of an op's outputs by `jax.eval_shape` of its lowering (default rule)."""

    def infer_output_specs(*specs: TensorSpec, **attrs: Any) -> list[TensorSpec]:
        key = (op.defn.name, tuple((s.shape, s.dtype) for s in specs), attribute_key(attrs))
        outputs = get_cached(
            _CACHE,
            key,
            lambda: tuple((s.shape, s.dtype) for s in abstract_outputs(op.defn, specs, attrs)),
        )
        return [_result_spec(shape, dt, specs, op) for shape, dt in outputs]

    return infer_output_specs


def abstract_outputs(defn: Any, specs: Sequence[TensorSpec], attrs: Any) -> list[Any]:
    """Returns the `ShapeDtypeStruct`s of the results of a pure op."""
    # As JAX computes: sessions refuse elements of 64 bits, and from 0.11 on JAX warns of them here.
    dtypes_of = (jax.dtypes.canonicalize_dtype(s.dtype.as_jax()) for s in specs)
    args = [jax.ShapeDtypeStruct(s.shape, d) for s, d in zip(specs, dtypes_of, strict=True)]
    out = jax.eval_shape(lambda *xs: defn.lower(*xs, **attrs), *args)
    return list(out) if isinstance(out, (tuple, list)) else [out]


def _result_spec(shape: Any, dtype: Any, inputs: Sequence[TensorSpec], op: Op) -> TensorSpec:
    from popxl.tensor import TensorSpec

    meta: tuple[int, ...] = ()
    if "elementwise" in op.defn.tags or op.inplace is not None:
        # An elementwise result of shards is a shard of the same full tensor.
        meta = common_meta_shape(s.meta_shape for s in inputs if s.shape == tuple(shape))
    return TensorSpec(tuple(shape), dtypes.dtype.as_dtype(np.dtype(dtype)), meta)


def attribute_key(value: Any) -> Any:
    """Returns a hashable key of an attribute's value that keeps no object of a program alive."""
    if isinstance(value, ReplicaGrouping):
        return ReplicaGrouping, tuple(value.assignment)
    if isinstance(value, dict):
        return tuple(sorted((k, attribute_key(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(attribute_key(v) for v in value)
    return type(value), value  # 1, 1.0 and True are equal, but make results of different dtypes
