"""Gradients of repeat and conditional, made of the gradient graphs of their bodies.

The gradient of a `repeat` runs the loop once more, keeping for each iteration the values that the
gradient graph of its body asks for, and then runs that graph for the iterations from last to
first. So whatever a gradient rule says of an op holds inside loops as well. The gradient of a
`conditional` does the same for the branch that was taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from popxl._analysis.effects import op_effects
from popxl._ir.op import Op
from popxl._ir.op_registry import NoGrad, define
from popxl._ir.regions import Region, regions
from popxl.errors import popart_exception
from popxl.graph import Graph
from popxl.ops._emit import emit
from popxl.ops.placement import init
from popxl.tensor import Tensor, TensorSpec
from popxl.transforms.gradient_ops import input_gradients, tensors_with_max_gradient

if TYPE_CHECKING:
    from popxl._analysis.functionalization import FunctionalGraph, Node
    from popxl._analysis.tracer_protocol import TracerProtocol
    from popxl.transforms.connections import GradGraphInfo

# An input of a gradient graph: the value of a tensor of the body, or the gradient of one that it
# returns, which is the sum of those of the outputs by which it does.
_Feed = tuple[Tensor | tuple[int, ...], ...]

_SECOND = NoGrad("second derivatives of loops and branches are not supported")


def _gradient_feed(info: GradGraphInfo) -> _Feed:
    returned: dict[Tensor, tuple[int, ...]] = {}
    for i, t in enumerate(info.forward_graph._outputs):
        returned[t] = (*returned.get(t, ()), i)
    return tuple(
        # Of several inputs for the gradient of one tensor, the first gets it all.
        c.fwd_tensor if c.connection_type.name == "Fwd" else returned.pop(c.fwd_tensor, ())
        for c in info.expected_inputs
    )


def _target_inputs(info: GradGraphInfo) -> tuple[int | None, ...]:
    """Returns, for each output of a gradient graph, the body input whose gradient it is."""
    inputs = info.forward_graph._inputs
    return tuple(inputs.index(t) if t in inputs else None for t in info.outputs)


def _check_pure(op: Op) -> None:
    if op_effects(op) or op.modified_inputs():
        raise popart_exception(
            f"{op.name} at {op.location} cannot be differentiated: its graph loads, stores or "
            "modifies state"
        )


def _specs_of_inputs(*specs: TensorSpec, wrt: tuple[int, ...], **_: Any) -> list[TensorSpec]:
    return [TensorSpec(specs[i].shape, specs[i].dtype) for i in wrt]


def _run_gradient_graph(
    tracer: TracerProtocol,
    graph: FunctionalGraph,
    feed: _Feed,
    targets: Sequence[int | None],
    values: Mapping[Tensor, Any],
    grads: Mapping[int, Any],
) -> dict[int, Any]:
    """Runs a gradient graph; returns the gradients of the body's inputs by index."""
    arrays = []
    for t, source in zip(graph.inputs, feed, strict=True):
        if isinstance(source, Tensor):
            arrays.append(values[source])
        else:
            terms = [grads[i] for i in source if i in grads]
            arrays.append(
                reduce(jnp.add, terms) if terms else jnp.zeros(t.spec.shape, t.spec.dtype.as_jax())
            )
    outs = zip(targets, tracer.run_graph(graph, arrays), strict=True)
    return {i: array for i, array in outs if i is not None}


# ---- loops --------------------------------------------------------------------------------------
def _residuals(op: Op) -> tuple[Tensor, ...]:
    """Returns the forward values that the body's gradient graph takes from each iteration."""
    constant = op.attrs["forward"]._inputs[op.attrs["carried"] :]
    return tuple(t for t in op.attrs["feed"] if isinstance(t, Tensor) and t not in constant)


def _execute_loop(tracer: TracerProtocol, node: Node, values: Sequence[Any]) -> Sequence[Any]:
    """Lowers a loop's gradient to two `lax.scan`s: the loop again, then its gradient in reverse."""
    op, (recomputed, reverse) = node.op, (region.graph for region in node.regions)
    assert op is not None
    body, carried, count = op.attrs["forward"], op.attrs["carried"], op.attrs["count"]
    provided, wrt = op.attrs["provided"], op.attrs["wrt"]
    start, given = values[: len(body._inputs)], values[len(body._inputs) :]
    constant = dict(zip(body._inputs[carried:], start[carried:], strict=True))
    residuals = _residuals(op)

    def forward(firsts: Any, _: Any) -> Any:
        outs = tracer.run_graph(recomputed, [*firsts, *start[carried:]])
        return outs[:carried], outs[len(body._outputs) :]

    def combine(i: int, total: Any, new: Any) -> Any:
        return jnp.maximum(total, new) if i in op.attrs["maxima"] else total + new

    def backward(carry: Any, saved: Any) -> Any:
        grads, totals = carry
        known_values = {**constant, **dict(zip(residuals, saved, strict=True))}
        dxs = _run_gradient_graph(
            tracer, reverse, op.attrs["feed"], op.attrs["targets"], known_values, grads
        )
        # An output that is not carried counts in the last iteration alone, which runs first here.
        passed = {
            i: dxs[i] if i < carried and i in dxs else jnp.zeros_like(g) for i, g in grads.items()
        }
        sums = {i: combine(i, total, dxs[i]) for i, total in totals.items() if i in dxs}
        return (passed, sums), None

    _, saved = lax.scan(forward, list(start[:carried]), None, length=count)
    totals = {i: jnp.zeros_like(start[i]) for i in op.attrs["targets"] if i is not None}
    first = (
        dict(zip(provided, given, strict=True)),
        {i: total for i, total in totals.items() if i >= carried},
    )
    (grads, totals), _ = lax.scan(backward, first, saved, length=count, reverse=True)
    everything = {**totals, **{i: g for i, g in grads.items() if i < carried}}
    return [everything[i] if i in everything else jnp.zeros_like(start[i]) for i in wrt]


def _regions_of_loop(op: Op) -> list[Region[Graph]]:
    count = op.attrs["count"]
    return [
        _gradient_region(op.attrs["forward"], count, _residuals(op)),
        _gradient_region(op.attrs["backward"], count),
    ]


def _gradient_region(
    graph: Graph, count: int = 1, extra_tensors: tuple[Tensor, ...] = ()
) -> Region[Graph]:
    return Region(
        graph,
        (None,) * len(graph._inputs),
        count=count,
        kind="derivative",
        extra_tensors=extra_tensors,
    )


REPEAT_GRAD = define(
    "repeat_grad",
    execute=_execute_loop,
    infer=_specs_of_inputs,
    grad=_SECOND,
    regions=_regions_of_loop,
)


def loop_grad(ctx: Any, op: Op, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns the gradients of the inputs of a `repeat` that changes no state.

    Raises:
        popart_exception: its graph touches state, so that running it again would repeat the effect.
    """
    _check_pure(op)
    body, carried = op.attrs["graph"], op.attrs["carried"]
    needed = _needed_in_loop(ctx, op)
    provided = tuple(
        i
        for i, t in enumerate(body._outputs)
        if t.dtype.is_floating_point and (i in needed if i < carried else grads[i] is not None)
    )
    returned = list(dict.fromkeys(body._outputs[i] for i in provided))
    info = ctx.gradient_graph_of(body, returned, [body._inputs[i] for i in sorted(needed)])
    wrt = tuple(i for i in sorted(needed) if ctx.needs(op, i))
    observed = tensors_with_max_gradient(body)
    attrs = {
        "forward": body, "backward": info.graph, "count": op.attrs["count"], "carried": carried,
        "feed": _gradient_feed(info), "targets": _target_inputs(info), "provided": provided,
        "wrt": wrt, "maxima": tuple(i for i in wrt if body._inputs[i] in observed),
    }  # fmt: skip
    given = [
        init(op.outputs[i].shape, op.outputs[i].dtype) if (g := grads[i]) is None else g
        for i in provided
    ]
    return input_gradients(op, wrt, emit(REPEAT_GRAD, [*map(ctx.fwd, op.inputs), *given], attrs))


def _needed_in_loop(ctx: Any, op: Op) -> set[int]:
    """Returns the indices of a loop's inputs whose gradients each iteration must compute.

    Required ones, and carried values that depend on them in some iteration.
    """
    body, carried = op.attrs["graph"], op.attrs["carried"]
    needed = {i for i in range(len(op.inputs)) if ctx.needs(op, i)}
    while True:
        reached = ctx.differentiable_outputs(body, [body._inputs[i] for i in needed])
        more = {i for i in reached if i < carried} - needed
        if not more:
            return needed
        needed |= more


# ---- branches -----------------------------------------------------------------------------------
def _execute_branch(tracer: TracerProtocol, node: Node, values: Sequence[Any]) -> Sequence[Any]:
    """Lowers a conditional's gradient to `lax.cond` between its branches' gradient graphs."""
    op = node.op
    assert op is not None
    forward = [region.graph for region in node.regions[:2]]
    reverse = iter(region.graph for region in node.regions[2:])
    backward = [None if graph is None else next(reverse) for graph in op.attrs["backward"]]
    count = 1 + sum(len(graph.inputs) for graph in forward)
    given = dict(zip(op.attrs["grad_indices"], values[count:], strict=True))

    def branch(k: int) -> Any:
        graph, first = forward[k], 1 + k * len(forward[0].inputs)
        gradient, feed, targets = (backward[k], op.attrs["feed"][k], op.attrs["targets"][k])

        def run(values: Any, given: Any) -> Any:
            dxs: dict[int, Any] = {}
            if gradient is not None:
                outs = tracer.run_graph(graph, values[first : first + len(graph.inputs)])
                residuals = _feed_tensors(feed)
                known_values = dict(zip(residuals, outs[len(outs) - len(residuals) :], strict=True))
                dxs = _run_gradient_graph(tracer, gradient, feed, targets, known_values, given)
            return [
                dxs[i - first] if i - first in dxs else jnp.zeros_like(values[i])
                for i in op.attrs["wrt"]
            ]

        return run

    condition = values[0].reshape(()).astype(bool)
    return lax.cond(condition, branch(0), branch(1), list(values[:count]), given)


def _feed_tensors(feed: _Feed | None) -> tuple[Tensor, ...]:
    return tuple(t for t in feed or () if isinstance(t, Tensor))


def _regions_of_branch(op: Op) -> list[Region[Graph]]:
    forward = zip(op.attrs["branches"], op.attrs["feed"], strict=True)
    return [
        *(_gradient_region(graph, extra_tensors=_feed_tensors(feed)) for graph, feed in forward),
        *(_gradient_region(graph) for graph in op.attrs["backward"] if graph is not None),
    ]


CONDITIONAL_GRAD = define(
    "conditional_grad",
    execute=_execute_branch,
    infer=_specs_of_inputs,
    grad=_SECOND,
    regions=_regions_of_branch,
)


def branch_grad(ctx: Any, op: Op, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns the gradients of the inputs of a `conditional` that changes no state.

    Raises:
        popart_exception: its graphs touch state, so that running one again would repeat the effect.
    """
    _check_pure(op)
    branches = tuple(region.graph for region in regions(op))
    grad_indices = tuple(i for i, g in enumerate(grads) if g is not None)
    infos: list[Any] = []
    first = 1
    for graph in branches:
        required = [t for i, t in enumerate(graph._inputs) if ctx.needs(op, first + i)]
        provided = list(dict.fromkeys(graph._outputs[i] for i in grad_indices))
        infos.append(ctx.gradient_graph_of(graph, provided, required) if required else None)
        first += len(graph._inputs)
    wrt = tuple(i for i in range(1, len(op.inputs)) if ctx.needs(op, i))
    attrs = {
        "branches": branches,
        "backward": tuple(info and info.graph for info in infos),
        "feed": tuple(info and _gradient_feed(info) for info in infos),
        "targets": tuple(info and _target_inputs(info) for info in infos),
        "grad_indices": grad_indices,
        "wrt": wrt,
    }
    inputs = [*map(ctx.fwd, op.inputs), *(g for g in grads if g is not None)]
    return input_gradients(op, wrt, emit(CONDITIONAL_GRAD, inputs, attrs))
