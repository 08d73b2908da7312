"""Reverse-mode automatic differentiation as a transform of graphs.

`autodiff(graph)` creates a gradient graph. Values of the forward graph that gradients need become
inputs of the gradient graph, and further outputs of the forward graph unless they are inputs or
outputs of it already; `GradGraphInfo` says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from popxl import context, dtypes
from popxl._analysis.memo import Memo
from popxl._analysis.verify import verify_if_enabled
from popxl._ir.op import Op
from popxl._ir.op_registry import NoGrad
from popxl.errors import popart_exception
from popxl.graph import Graph
from popxl.ops._emit import emit
from popxl.ops.call import CALL, CallSiteInfo
from popxl.ops.placement import init
from popxl.tensor import Constant, Tensor, constant
from popxl.transforms.connections import ExpectedConnection, ExpectedConnectionType, GradGraphInfo
from popxl.transforms.gradient_ops import (
    generic_grad,
    gradient_rule,
    grads_by_output,
    sum_gradients,
    tensors_with_max_gradient,
)
from popxl.transforms.saveable import may_save

_weight_gradient_dtype: ContextVar[dtypes.dtype | None] = ContextVar(
    "weight_gradient_dtype", default=None
)


@contextmanager
def accumulate_weight_gradients_in(dtype: dtypes.dtype | None) -> Iterator[None]:
    """Context in which FP8 matmuls give the gradients of weights in `dtype`, unrounded.

    A product in the accumulator's dtype adds to it as it is written, on GPUs: cublasLt's C += A B.

    Args:
        dtype: None: that of the weight.
    """
    token = _weight_gradient_dtype.set(dtype)
    try:
        yield
    finally:
        _weight_gradient_dtype.reset(token)


def autodiff(
    graph: Graph,
    grads_provided: Iterable[Tensor] | None = None,
    grads_required: Iterable[Tensor] | None = None,
    called_graphs_grad_info: Mapping[Graph, GradGraphInfo] | None = None,
    return_all_grad_graphs: bool = False,
) -> GradGraphInfo | dict[Graph, GradGraphInfo]:
    """Creates the gradient graph of `graph`.

    Args:
        grads_provided: outputs of `graph` whose gradients are given to the gradient graph;
            default: all its floating-point outputs now.
        grads_required: tensors of `graph` whose gradients are wanted, which are the outputs in
            this order; default: its inputs that have one. A tensor that no output depends on gets
            zeros if it is named, and is left out otherwise.
        called_graphs_grad_info: gradient graphs to use for graphs that `graph` calls.
        return_all_grad_graphs: also return those made for called graphs.

    Returns:
        Information on the gradient graph; or, with `return_all_grad_graphs`, a dict of it for
        each graph.

    Raises:
        popart_exception: an op of `graph`, or of a graph it calls that must be differentiated,
            changes the value of a tensor in place (views are fine); or an op has no gradient where
            one is needed.
        ValueError: a tensor is no tensor of the graph, or none of its outputs has a gradient.
    """
    session = _Autodiff(dict(called_graphs_grad_info or {}))
    info = session.differentiate(
        graph,
        None if grads_provided is None else list(grads_provided),
        None if grads_required is None else list(grads_required),
    )
    verify_if_enabled(graph.ir)
    return {**session.grad_infos, graph: info} if return_all_grad_graphs else info


class _Autodiff:
    """One call of `autodiff`: makes the gradient graph of each called graph once."""

    def __init__(self, called_grad_infos: dict[Graph, GradGraphInfo]) -> None:
        self.called_grad_infos = called_grad_infos
        self.grad_infos: dict[Graph, GradGraphInfo] = {}
        self._memo: dict[Any, GradGraphInfo] = {}
        self._deep = Memo()

    def differentiate_callee(
        self, graph: Graph, provided: list[Tensor], required: list[Tensor], expose: bool = True
    ) -> GradGraphInfo:
        if graph in self.called_grad_infos:
            return self.called_grad_infos[graph]
        if graph._gradient_is_written:
            raise popart_exception(
                f"the gradient of graph {graph.id!r} is written by hand, and is not that of its "
                "ops: pass it in called_graphs_grad_info"
            )
        key = (graph, tuple(provided), tuple(required), expose)
        info = self._deep.get_or_compute(
            self._memo, key, lambda: self.differentiate(graph, provided, required, expose)
        )
        if expose:
            self.grad_infos[graph] = info
        return info

    def differentiate(
        self,
        graph: Graph,
        provided: list[Tensor] | None,
        required: list[Tensor] | None,
        expose: bool = True,
    ) -> GradGraphInfo:
        """Creates the gradient graph of `graph`; `expose` makes saved values outputs of `graph`."""
        for t in [*(provided or []), *(required or [])]:
            if t not in graph:
                raise ValueError(f"autodiff: {t!r} is no tensor of graph {graph.id!r}")
        _check_nothing_modified(graph)
        explicit = required is not None
        if provided is None:
            provided = [t for t in graph._outputs if t.dtype.is_floating_point]
            if expose and graph._outputs and not provided:
                names = ", ".join(f"{t.name} {t.dtype.name}" for t in graph._outputs)
                raise ValueError(
                    f"autodiff: graph {graph.id!r} has no floating-point output ({names}), so "
                    "there is nothing to differentiate: return the number that the gradient is of"
                )
        if required is None:
            required = [t for t in graph._inputs if t.dtype.is_floating_point]
        name = graph.name.partition("_subgraph(")[0] + "_grad"
        with graph.ir._new_current_graph(name) as grad_graph:
            ctx = GradContext(self, graph, grad_graph, required)
            ctx.add_grad_inputs(provided)
            ctx.differentiate_ops()
            outs = ctx.set_outputs(required, explicit)
            if expose:
                ctx.expose_values()
        return GradGraphInfo._make(grad_graph, graph, tuple(ctx.expected), tuple(outs))


def _check_nothing_modified(graph: Graph) -> None:
    """Raises popart_exception if an op modifies a value that a gradient can need."""
    for op in graph._ops:
        if op.modified_inputs():
            raise popart_exception(
                f"The graph {graph.id} contains a modifying op: `{op}` ({op.location}) changes a "
                "tensor in place, so that it cannot be differentiated; use the variant that is "
                "not in place"
            )


def dependent_tensors(graph: Graph, required: Iterable[Tensor]) -> set[Tensor]:
    """Returns the tensors of `graph` that depend differentiably on a `required` tensor."""
    dependent = set(required)
    for op in graph._ops:
        if not isinstance(op.defn.grad, NoGrad) and not dependent.isdisjoint(op.inputs):
            dependent.update(t for t in op.outputs if t.dtype.is_floating_point)
    return dependent


class GradContext:
    """Gradient graph under construction; gradient rules get it as `ctx`."""

    def __init__(
        self, session: _Autodiff, forward: Graph, grad_graph: Graph, required: list[Tensor]
    ) -> None:
        self._session, self._forward, self._graph = session, forward, grad_graph
        self._needed = dependent_tensors(forward, required)
        self._observed = tensors_with_max_gradient(forward)
        self._grads: dict[Tensor, list[Tensor]] = {}
        self._known: dict[Tensor, Tensor] = {}
        self.expected: list[ExpectedConnection] = []

    # ---- for gradient rules ---------------------------------------------------------------------
    def needs(self, op: Op, index: int) -> bool:
        """True if the gradient with respect to input `index` of `op` is required."""
        t = op.inputs[index]
        return t in self._needed and t.dtype.is_floating_point

    @staticmethod
    def weight_gradient_dtype(default: dtypes.dtype) -> dtypes.dtype:
        """Returns the dtype in which an FP8 matmul gives the gradient of its weight."""
        return _weight_gradient_dtype.get() or default

    def fwd(self, t: Tensor) -> Tensor:
        """Returns the gradient graph's tensor with the value of forward tensor `t`."""
        worklist = [t]
        while worklist:  # chains of what is computed again are long: no recursion
            tensor = worklist[-1]
            sources = self._recompute_sources(tensor)
            missing = [i for i in sources or () if i not in self._known]
            if tensor in self._known or not missing:
                worklist.pop()
                if tensor not in self._known:
                    self._make_available(tensor, sources is not None)
            else:
                worklist += reversed(missing)
        return self._known[t]

    def _recompute_sources(self, t: Tensor) -> list[Tensor] | None:
        """Returns the tensors to recompute `t` from; None if `t` is saved (see `save_policy`)."""
        op = t._producer
        if op is None or op.defn.lower is None or op.inplace is not None or may_save(op):
            return None
        return op.inputs

    def _make_available(self, t: Tensor, recompute: bool) -> None:
        """Adds `t` to the gradient graph as a constant, a recomputed value or an input."""
        op = t._producer
        if isinstance(t, Constant):
            with self._graph:
                self._known[t] = constant(t._data, t.dtype, t.name)
        elif recompute and op is not None:
            with self._graph:
                names = [f"fwd_{out.name}" for out in op.outputs]
                inputs = [self._known[i] for i in op.inputs]
                outputs = emit(op.defn, inputs, op.attrs, names=names)
                self._known.update(zip(op.outputs, outputs, strict=True))
        else:
            self._known[t] = self._graph._add_input(t.spec, f"fwd_{t.name}")
            self.expected.append(ExpectedConnection._make(t, ExpectedConnectionType.Fwd))

    def call_grad(self, op: Op, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Adds a call of the called graph's gradient graph (gradient of a call)."""
        called: Graph = op.attrs["graph"]
        given = grads_by_output(called, grads)
        required = [t for i, t in enumerate(called._inputs) if self.needs(op, i)]
        info = self._session.differentiate_callee(called, list(given), required)
        site = CallSiteInfo(op)
        inputs = []
        for connection in info.expected_inputs:
            t = connection.fwd_tensor
            if connection.connection_type is ExpectedConnectionType.Fwd:
                inputs.append(self.fwd(site.graph_to_parent(t)))
            else:  # of several inputs for one tensor, the first gets it all
                inputs.append(sum_gradients(given.pop(t)) if t in given else init(t.shape, t.dtype))
        outs = emit(CALL, inputs, {"graph": info.graph})
        grad_of = {c.fwd_tensor: g for c, g in zip(info.expected_outputs, outs, strict=True)}
        return [grad_of.get(t) for t in called._inputs]

    def loop_grad(self, op: Op, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Returns the gradients of the inputs of a `repeat` op."""
        from popxl.transforms.control_flow_gradients import loop_grad

        return loop_grad(self, op, grads)

    def branch_grad(self, op: Op, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Returns the gradients of the inputs of a `conditional` op."""
        from popxl.transforms.control_flow_gradients import branch_grad

        return branch_grad(self, op, grads)

    def gradient_graph_of(
        self, graph: Graph, provided: list[Tensor], required: list[Tensor]
    ) -> GradGraphInfo:
        """Returns a called graph's gradient graph; its saved values do not become outputs."""
        return self._session.differentiate_callee(graph, provided, required, expose=False)

    @staticmethod
    def differentiable_outputs(graph: Graph, required: Iterable[Tensor]) -> set[int]:
        """Returns the indices of the outputs of `graph` that depend on a required tensor."""
        dependent = dependent_tensors(graph, required)
        return {i for i, t in enumerate(graph._outputs) if t in dependent}

    # ---- construction ---------------------------------------------------------------------------
    def add_grad_inputs(self, tensors: list[Tensor]) -> None:
        """Adds an input to the gradient graph for the gradient of each of `tensors`."""
        for t in tensors:
            grad = self._graph._add_input(t.spec, f"grad_{t.name}")
            self.expected.append(ExpectedConnection._make(t, ExpectedConnectionType.FwdGrad))
            self._accumulate_grad(t, grad)

    def _accumulate_grad(self, t: Tensor, grad: Tensor) -> None:
        """Adds a term to the gradient of `t`, if that gradient is needed."""
        if t in self._needed:
            self._grads.setdefault(t, []).append(grad)

    def differentiate_ops(self) -> None:
        """Adds the gradient ops of the forward graph's ops, from last to first."""
        for op in reversed(self._forward.ops):
            if self._grads.keys().isdisjoint(op.outputs):
                continue
            with context.ipu(op.ipu):
                grads = self._apply_rule(op, [self._total_grad(t) for t in op.outputs])
            for t, g in zip(op.inputs, grads, strict=True):
                if g is not None:
                    self._accumulate_grad(t, g)

    def _apply_rule(self, op: Op, grads: list[Tensor | None]) -> Sequence[Tensor | None]:
        rule = gradient_rule(op.defn)
        if rule is None:
            raise popart_exception(f"{op.name} at {op.location} has no gradient")
        if rule is generic_grad:
            return generic_grad(self, op, grads)
        return rule(self, op, *grads)

    def _total_grad(self, t: Tensor) -> Tensor | None:
        terms = self._grads.get(t)
        if not terms:
            return None
        maximum = len(terms) > 1 and t in self._observed
        self._grads[t] = [sum_gradients(terms, maximum)]
        return self._grads[t][0]

    def set_outputs(self, required: list[Tensor], is_explicit: bool) -> list[ExpectedConnection]:
        """Makes the gradients of the required tensors the outputs of the gradient graph."""
        outs = []
        for t in required:
            g = self._total_grad(t)
            if g is None:
                if not is_explicit:
                    continue
                g = init(t.shape, t.dtype)
            self._graph._add_output(g)
            outs.append(ExpectedConnection._make(t, ExpectedConnectionType.FwdGrad))
        return outs

    def expose_values(self) -> None:
        """Makes the forward values that the gradient graph takes outputs of the forward graph."""
        available = {*self._forward._inputs, *self._forward._outputs}
        for connection in self.expected:
            if connection.fwd_tensor not in available:
                self._forward._add_output(connection.fwd_tensor)
                available.add(connection.fwd_tensor)
