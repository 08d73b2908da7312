"""Ops of gradient graphs: sums of gradients, and generic vector-Jacobian products."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from popxl._analysis.memo import get_cached, graph_cached
from popxl._analysis.shape_inference import attribute_key
from popxl._ir.op import Op
from popxl._ir.op_registry import NoGrad, OpDef, define, registry
from popxl._ir.regions import regions
from popxl.graph import Graph
from popxl.ops._emit import emit
from popxl.ops._reductions import traced_platform
from popxl.ops.placement import materialize_array
from popxl.tensor import Tensor, TensorSpec


# ---- sum of gradients, maximum of what was observed ----------------------------------------------
def _sum_grad(ctx: Any, op: Op, dy: Tensor | None) -> Sequence[Tensor | None]:
    return [dy] * len(op.inputs)


_FUSED_TERMS = 64  # see `popxl._compile.fusion_limit`


def _sum_terms(*terms: jax.Array) -> jax.Array:
    total = terms[0]
    for i, term in enumerate(terms[1:], 1):
        total = total + term
        if i % _FUSED_TERMS == 0 and traced_platform() == "cpu":
            total = materialize_array(total)
    return total


GRAD_SUM = define(
    "grad_sum",
    _sum_terms,
    infer=lambda *specs: [specs[0]],
    grad=_sum_grad,
    dtypes="same",
)


GRAD_MAXIMUM = define(
    "grad_maximum",
    lambda *xs: reduce(jnp.maximum, xs),
    infer=lambda *specs: [specs[0]],
    grad=NoGrad("what was observed is not differentiated"),
    dtypes="same",
)


def sum_gradients(grads: Sequence[Tensor], is_maximum: bool = False) -> Tensor:
    """Adds up a tensor's gradients, or takes their maximum (see `tensors_with_max_gradient`)."""
    if len(grads) == 1:
        return grads[0]
    return emit(GRAD_MAXIMUM if is_maximum else GRAD_SUM, grads)[0]


@graph_cached
def tensors_with_max_gradient(graph: Graph) -> set[Tensor]:
    """Returns the tensors of `graph` whose gradients are observed maxima, such as amaxes.

    They are the `OpDef.max_gradient_inputs` of its ops, and of the ops in graphs that these run.
    """
    return {
        t
        for op in graph._ops
        for i, t in enumerate(op.inputs)
        if i in op.defn.max_gradient_inputs
        or any(inner in tensors_with_max_gradient(inner._graph) for inner in _callee_inputs(op, i))
    }


def _callee_inputs(op: Op, index: int) -> list[Tensor]:
    """Returns the called graphs' input tensors that receive input `index` of `op`."""
    return [
        t
        for region in regions(op)
        for t, input_index in zip(region.graph._inputs, region.inputs, strict=True)
        if input_index == index
    ]


def grads_by_output(graph: Graph, grads: Sequence[Tensor | None]) -> dict[Tensor, list[Tensor]]:
    """Groups the gradients of a graph's outputs by output tensor, which can be returned twice."""
    by_tensor: dict[Tensor, list[Tensor]] = {}
    for t, g in zip(graph._outputs, grads, strict=True):
        if g is not None:
            by_tensor.setdefault(t, []).append(g)
    return by_tensor


# ---- generic gradient of a pure op --------------------------------------------------------------
def _vjp(
    *arrays: Any,
    op_name: str,
    base_attrs: tuple[tuple[str, Any], ...],
    specs: tuple[TensorSpec, ...],
    input_indices: tuple[int, ...],
    wrt: tuple[int, ...],
    grad_indices: tuple[int, ...],
) -> Any:
    """Returns an op's input cotangents (`wrt`).

    Args:
        arrays: the inputs `input_indices` and the cotangents of the outputs `grad_indices`.
    """
    defn, attrs = registry()[op_name], dict(base_attrs)
    values: list[Any] = [None] * len(specs)
    for i, x in zip(input_indices, arrays, strict=False):
        values[i] = x
    for i, spec in enumerate(specs):
        if values[i] is None:  # the derivative does not depend on it: its shape is enough
            values[i] = jnp.zeros(spec.shape, spec.dtype.as_jax())

    def forward(*arrays: Any) -> list[Any]:
        args = list(values)
        for i, x in zip(wrt, arrays, strict=True):
            args[i] = x
        assert defn.lower is not None
        outs = defn.lower(*args, **attrs)
        outs = outs if isinstance(outs, (tuple, list)) else [outs]
        return [outs[i] for i in grad_indices]

    _, pull = jax.vjp(forward, *(values[i] for i in wrt))
    return tuple(pull(list(arrays[len(input_indices) :])))


def _infer_vjp(*_: TensorSpec, specs: Any, wrt: tuple[int, ...], **__: Any) -> list[TensorSpec]:
    return [TensorSpec(specs[i].shape, specs[i].dtype) for i in wrt]


VJP = define(
    "vjp",
    _vjp,
    infer=_infer_vjp,
    result=lambda op: [f"{op.attrs['op_name']}_grad_out"] * len(op.attrs["wrt"]),
)


_USED: dict[Any, tuple[int, ...]] = {}


def _inputs_used(*key: Any) -> tuple[int, ...]:
    """Returns the indices of an op's inputs that its vector-Jacobian product reads (cached)."""
    return get_cached(_USED, attribute_key(key), lambda: _find_inputs_used(*key))


def _find_inputs_used(
    op_name: str,
    base_attrs: tuple[tuple[str, Any], ...],
    specs: tuple[TensorSpec, ...],
    outs: tuple[TensorSpec, ...],
    wrt: tuple[int, ...],
    grad_indices: tuple[int, ...],
) -> tuple[int, ...]:
    """Returns the indices of an op's inputs that the cotangents of `wrt` depend on."""
    everything = tuple(range(len(specs)))

    def run(*arrays: Any) -> Any:
        return _vjp(*arrays, op_name=op_name, base_attrs=base_attrs, specs=specs,
                    input_indices=everything, wrt=wrt, grad_indices=grad_indices)  # fmt: skip

    abstract = [
        jax.ShapeDtypeStruct(s.shape, s.dtype.as_jax())
        for s in (*specs, *(outs[i] for i in grad_indices))
    ]
    jaxpr = jax.make_jaxpr(run)(*abstract).jaxpr
    live = {v for v in jaxpr.outvars if not hasattr(v, "val")}
    for eqn in reversed(jaxpr.eqns):
        if any(v in live for v in eqn.outvars):
            live.update(v for v in eqn.invars if not hasattr(v, "val"))
    return tuple(i for i in everything if jaxpr.invars[i] in live)


def generic_grad(ctx: Any, op: Op, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Differentiates a pure op by `jax.vjp` of its lowering; takes only the values it needs."""
    attrs = tuple(sorted(op.attrs.items()))
    specs = tuple(t.spec for t in op.inputs)
    wrt = tuple(i for i, t in enumerate(op.inputs) if ctx.needs(op, i))
    grad_indices = tuple(i for i, g in enumerate(grads) if g is not None)
    outs = tuple(t.spec for t in op.outputs)
    input_indices = _inputs_used(op.defn.name, attrs, specs, outs, wrt, grad_indices)
    inputs = [*(ctx.fwd(op.inputs[i]) for i in input_indices), *(grads[i] for i in grad_indices)]
    dxs = emit(
        VJP,
        inputs,
        {"op_name": op.defn.name, "base_attrs": attrs, "specs": specs,
         "input_indices": input_indices, "wrt": wrt, "grad_indices": grad_indices},
    )  # fmt: skip
    return input_gradients(op, wrt, dxs)


def input_gradients(
    op: Op, wrt_indices: Sequence[int], grads: Sequence[Tensor]
) -> list[Tensor | None]:
    """Returns an op's gradients by input: `grads` at `wrt_indices`, None elsewhere."""
    dxs: list[Tensor | None] = [None] * len(op.inputs)
    for i, g in zip(wrt_indices, grads, strict=True):
        dxs[i] = g
    return dxs


def gradient_rule(defn: OpDef) -> Any:
    """Returns an op definition's gradient rule; by default, `jax.vjp` of its lowering."""
    if defn.grad is not None:
        return defn.grad
    return generic_grad if defn.lower is not None else None
