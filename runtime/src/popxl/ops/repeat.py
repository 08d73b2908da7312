"""Loops: a graph repeated for a fixed number of iterations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from popxl import context
from popxl._ir.argument_checks import check_integer
from popxl._ir.op import Op
from popxl._ir.op_registry import define
from popxl.errors import SpecError
from popxl.graph import Graph
from popxl.ops._emit import emit
from popxl.ops.call import (
    CallSiteInfo,
    called_output_names,
    called_output_specs,
    called_regions,
    gather_inputs,
)
from popxl.tensor import Tensor


def _repeat_grad(ctx: Any, op: Op, *grads: Tensor | None) -> Sequence[Tensor | None]:
    return ctx.loop_grad(op, grads)


REPEAT = define(
    "repeat",
    infer=called_output_specs,
    grad=_repeat_grad,
    regions=called_regions,
    result=called_output_names,
)


def repeat(
    graph: Graph,
    repeat_count: int,
    *inputs: Tensor | Iterable[Tensor],
    inputs_dict: Mapping[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Runs `graph` `repeat_count` times and returns the outputs of the last iteration.

    The graph's first inputs, as many as it has outputs, are carried: in each iteration but the
    first they are the outputs of the one before. The other inputs keep their values, unless they
    are by-reference and the graph changes them.

    A by-reference input that is carried, and that the graph changes, is what it stands for: after
    each iteration, also the last or only one, that holds the output. A `call` leaves there what the
    graph made of it.

    Raises:
        TypeError: `repeat_count` is no integer.
        ValueError: `repeat_count` is negative, or wrong number of inputs.
        SpecError: an input, or a carried output, does not fit.
    """
    return repeat_with_info(graph, repeat_count, *inputs, inputs_dict=inputs_dict).outputs


def repeat_with_info(
    graph: Graph,
    repeat_count: int,
    *inputs: Tensor | Iterable[Tensor],
    inputs_dict: Mapping[Tensor, Tensor] | None = None,
    check_inputs: bool = True,
) -> CallSiteInfo:
    """Adds a loop like `repeat`, and returns information on the call site."""
    if isinstance(repeat_count, Tensor):
        raise TypeError(
            f"repeat: repeat_count is known when the program is written, and not the tensor "
            f"{repeat_count.id!r}: repeat as often as it can be needed, and choose by "
            "ops.conditional or ops.where in the graph"
        )
    repeat_count = check_integer("repeat", "repeat_count", repeat_count, 0)
    tensors = gather_inputs(graph, inputs, inputs_dict, "repeat", check_inputs)
    carried = len(graph._outputs)
    if carried > len(graph._inputs):
        raise ValueError(
            f"repeat: graph {graph.id!r} has {carried} outputs but only {len(graph._inputs)} "
            "inputs to carry them to the next iteration"
        )
    for out, into in zip(graph._outputs, graph._inputs, strict=False):
        if (out.shape, out.dtype) != (into.shape, into.dtype):
            from popxl._analysis.printing import format_spec

            raise SpecError(
                f"repeat at {context.get_source_location()}: output {out.name!r} of graph "
                f"{graph.id!r} is {format_spec(out.spec)}, but the input it is carried to, "
                f"{into.name!r}, is {format_spec(into.spec)}"
            )
    here = context.get_current_graph()
    attrs = {"graph": graph, "count": repeat_count, "carried": carried}
    emit(REPEAT, tensors, attrs)
    return CallSiteInfo(here._ops[-1])
