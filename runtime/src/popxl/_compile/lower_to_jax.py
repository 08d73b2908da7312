"""Lowering of ops to JAX: calls JAX for each op of functional graphs while a segment is traced.

`SegmentTracer` holds the state that ops change directly: stream data and positions, faults, and the
number of stochastic roundings. The values of a graph are a dict by `Value`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from popxl._analysis.effects import Effects
from popxl._analysis.printing import first_error_line
from popxl._compile.fusion_limit import FusionLimiter
from popxl._ir.host_data import device_view
from popxl.errors import popart_exception
from popxl.ops.placement import materialize_array

if TYPE_CHECKING:
    from popxl._analysis.functionalization import FunctionalGraph, Node, Value
    from popxl._ir.op import Op
    from popxl._ir.regions import Region
    from popxl.streams import Stream
    from popxl.tensor import TensorSpec


PART_SCOPE = "part"  # marks the labels of parts among the scopes that JAX knows ops by


@dataclass
class SegmentTracer:
    """Lowers functional nodes to JAX, and tracks stream data and runtime checks of a segment.

    Attributes:
        streams: data of each stream on this replica, (transfers, *shape).
        positions: the next transfer of each stream.
        constants: values of the constants that are arguments of the segment, by `_content_key`.
        checks: ops whose rules on values are checked, with a number from 1 for each.
        watched: ops whose results must be finite, with a number for each.
        infinite: whether infinities count as non-finite, besides NaN.
        fault: number of the first op that broke its rule; 0: none did.
        seed: of the random numbers that updates of 16-bit variables are rounded with, uint32 (2,);
            None: they are rounded to nearest.
        rounding_index: number of stochastic roundings so far (see `Op.can_round_stochastically`).
        addable: results of ops that can add to something at once, by their identity, with what does
            it: where they are only added, nothing else needs them, and XLA leaves them out.
        fusion_limiter: bounds what XLA fuses.
    """

    streams: dict[Stream, jax.Array] = field(default_factory=dict)
    positions: dict[Stream, Any] = field(default_factory=dict)
    constants: dict[int, jax.Array] = field(default_factory=dict)
    checks: Mapping[Op, int] = field(default_factory=dict)
    watched: Mapping[Op, int] = field(default_factory=dict)
    infinite: bool = False
    fault: Any = 0
    seed: Any = None
    rounding_index: Any = 0
    addable: dict[int, tuple[Any, Callable[[Any], Any]]] = field(default_factory=dict)
    fusion_limiter: FusionLimiter = field(default_factory=FusionLimiter)

    # ---- streams --------------------------------------------------------------------------------
    def next_position(self, stream: Stream) -> Any:
        position = self.positions[stream]
        self.positions[stream] = position + 1
        return position

    def host_load(self, stream: Stream) -> jax.Array:
        """Returns the next transfer of a host-to-device stream, while a segment is traced."""
        data = self.streams[stream]
        return lax.dynamic_index_in_dim(data, self.next_position(stream), 0, keepdims=False)

    def host_store(self, stream: Stream, value: jax.Array) -> None:
        """Appends a traced value to the transfers of a device-to-host stream."""
        position = self.next_position(stream)
        self.streams[stream] = lax.dynamic_update_index_in_dim(
            self.streams[stream], value, position, 0
        )

    # ---- checks ---------------------------------------------------------------------------------
    def check_inputs(self, op: Op, inputs: Sequence[jax.Array]) -> None:
        """Records a failed runtime check if traced `inputs` of `op` violate its rule."""
        if op in self.checks and op.defn.check is not None:
            broken = jnp.reshape(op.defn.check.broken(*inputs, **op.attrs), ())
            self._record_fault(broken, self.checks[op])

    def check_nonfinite(
        self, node: Node, inputs: Sequence[jax.Array], results: Sequence[jax.Array]
    ) -> None:
        """Records a failed runtime check if an op makes NaN (or infinity) from finite inputs.

        Ops in its regions are watched themselves.
        """
        op = node.op
        if op is None or node.kind != "op" or op not in self.watched:
            return
        if not node.regions or op.defn.execute is not None:
            is_new = self._has_nonfinite(results) & ~self._has_nonfinite(inputs)
            self._record_fault(is_new, self.watched[op])

    def _has_nonfinite(self, arrays: Sequence[jax.Array]) -> jax.Array:
        floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]
        broken = [~jnp.isfinite(x) if self.infinite else jnp.isnan(x) for x in floats]
        # Never an array of no elements: see `global_function`.
        return jnp.any(jnp.asarray([False, *map(jnp.any, broken)]))

    def _record_fault(self, broken: jax.Array, fault_number: int) -> None:
        self.fault = jnp.where(broken & (self.fault == 0), fault_number, self.fault)

    @contextmanager
    def checks_disabled(self) -> Iterator[None]:
        """Context in which no runtime checks are traced."""
        saved_state = self.checks, self.watched
        self.checks, self.watched = {}, {}
        try:
            yield
        finally:
            self.checks, self.watched = saved_state

    # ---- rounding -------------------------------------------------------------------------------
    def rounding_args(self, op: Op) -> dict[str, Any]:
        """Returns the keyword argument `rounding` of an op that rounds stochastically; else {}."""
        if self.seed is None or not op.can_round_stochastically:
            return {}
        number = self.rounding_index
        self.rounding_index = number + 1
        return {"rounding": (self.seed, number)}

    # ---- running --------------------------------------------------------------------------------
    def run_graph(self, graph: FunctionalGraph, inputs: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns a graph's traced outputs; nested calls use an explicit stack, no recursion."""
        frame = _GraphFrame(None, graph, inputs)
        callers: list[_GraphFrame] = []
        with ExitStack() as stack:
            while True:
                for node in frame.nodes:
                    if _is_call(node):
                        callers.append(frame)
                        frame = self._enter_call(node, frame.values)
                        stack.push(frame.scopes)
                        break
                    self.execute_node(node, frame.values)
                else:
                    outputs = [self.read_value(v, frame.values) for v in frame.graph.outputs]
                    if frame.node is None:
                        return outputs
                    frame.scopes.close()
                    node, frame = frame.node, callers.pop()
                    frame.values.update(
                        zip(node.outputs, _call_results(node, outputs), strict=True)
                    )

    def _enter_call(self, node: Node, values: Mapping[Value, jax.Array]) -> _GraphFrame:
        """Returns a new call frame for the graph that a call node runs."""
        (region,), op = node.regions, node.op
        assert op is not None
        arrays = [self.read_value(v, values) for v in node.inputs]
        frame = _GraphFrame(node, region.graph, [arrays[i] for i in region.inputs if i is not None])
        frame.scopes.enter_context(jax.named_scope(op.name))
        frame.scopes.enter_context(part_scope(node.part))
        return frame

    def read_value(self, value: Value, values: Mapping[Value, jax.Array]) -> jax.Array:
        """Returns the traced JAX array of a value or constant."""
        if value in values:
            return values[value]
        # Not cached: an array made while tracing a loop body must not be used outside it.
        t: Any = value.tensor
        constant = self.constants.get(t._content_key)
        return jnp.asarray(device_view(t._data)) if constant is None else constant

    def execute_node(self, node: Node, values: dict[Value, jax.Array]) -> None:
        """Lowers one node to JAX; its traced outputs are added to `values`.

        Raises:
            popart_exception: with the op and the user's line, if what it means cannot be computed.
        """
        arrays = [self.read_value(v, values) for v in node.inputs]
        op = node.op
        if op is None:
            results = self._lower_node(node, arrays)
        else:
            try:
                with jax.named_scope(op.name), part_scope(node.part):
                    results = self._lower_node(node, arrays)
            except popart_exception:
                raise  # it is for the user already, or names an op of a called graph
            except Exception as error:
                raise popart_exception(
                    f"graph {op.graph.id!r}: `{op}` ({op.location}) cannot be lowered to XLA: "
                    f"{type(error).__name__}: {first_error_line(error)}"
                ) from error
        results = self.fusion_limiter.limit_fusion(node, arrays, results)
        self.check_nonfinite(node, arrays, results)
        values.update(zip(node.outputs, results, strict=True))

    def _lower_node(self, node: Node, arrays: list[jax.Array]) -> Sequence[jax.Array]:
        if node.kind == "zeros":
            return [_zeros_array(node.outputs[0].spec)]
        if node.kind == "barrier":
            return [materialize_array(arrays[0])]
        op = node.op
        assert op is not None
        if node.kind == "write":
            assert op.defn.view_write is not None, f"{op.name} has no rule to write through"
            return op.defn.view_write(tuple(arrays[:-1]), arrays[-1], **op.attrs)
        if op.defn.lower is not None:
            self.check_inputs(op, arrays)
            rounding_args = self.rounding_args(op) if node.kind == "op" else {}
            if (
                "sum" in op.defn.tags
                and not (op.attrs or rounding_args)
                and id(arrays[1]) in self.addable
            ):
                return [self.addable[id(arrays[1])][1](arrays[0])]
            result = op.defn.lower(*arrays, **op.attrs, **rounding_args)
            if op.defn.add_to is not None:
                add_to = partial(op.defn.add_to, **op.attrs)
                self.addable[id(result)] = result, lambda t: add_to(t, *arrays)
            return result if isinstance(result, (tuple, list)) else [result]
        if op.defn.execute is None:
            return self._run_regions(node, arrays)
        # A gradient may run graphs again: they were checked when they were called.
        with self.checks_disabled() if node.regions else nullcontext():
            return op.defn.execute(self, node, arrays)

    # ---- loops and branches ---------------------------------------------------------------------
    def _run_regions(self, node: Node, arrays: list[jax.Array]) -> Sequence[jax.Array]:
        region = node.regions[0]
        if region.kind == "branch":
            outs = self._lower_branch(node.regions, arrays)
        else:
            outs = self._lower_loop(region, [arrays[i] for i in region.inputs if i is not None])
        return _call_results(node, outs)

    def _lower_loop(
        self, region: Region[FunctionalGraph], arguments: list[jax.Array]
    ) -> Sequence[jax.Array | None]:
        """Lowers a call, or a loop as a `lax.fori_loop` that carries only the values it changes."""
        graph = region.graph
        if region.count == 1:
            return self.run_graph(graph, arguments)
        used_outputs = [k for k, position in enumerate(region.outputs) if position is not None]
        state = LoopState(self, [graph], region.count)

        def lower_iteration(index: Any, carry: Any) -> Any:
            outs, saved = carry
            with state.restored(saved, index):
                inputs = list(arguments)
                for k, i in region.carried:
                    inputs[i] = outs[k]
                new = self.run_graph(graph, inputs)
                return {k: new[k] for k in used_outputs}, state.snapshot()

        input_of_output = dict(region.carried)
        start = {
            k: arguments[input_of_output[k]]
            if k in input_of_output
            else _zeros_array(graph.outputs[k].spec)
            for k in used_outputs
        }
        outs, saved = lax.fori_loop(0, region.count, lower_iteration, (start, state.snapshot()))
        state.set_final(saved)
        return [outs.get(k) for k in range(len(graph.outputs))]

    def _lower_branch(
        self, branches: Sequence[Region[FunctionalGraph]], arrays: list[jax.Array]
    ) -> Sequence[jax.Array]:
        """Lowers a conditional to `lax.cond`."""
        state = LoopState(self, [region.graph for region in branches])

        def lower_region(region: Region[FunctionalGraph]) -> Any:
            def run(saved: Any, arrays: Any) -> Any:
                inputs = [arrays[i] for i in region.inputs if i is not None]
                with state.restored(saved):
                    return self.run_graph(region.graph, inputs), state.snapshot()

            return run

        condition = arrays[0].reshape(()).astype(bool)
        outs, saved = lax.cond(condition, *map(lower_region, branches), state.snapshot(), arrays)
        state.set_final(saved)
        return outs


class LoopState:
    """Stream data, stream positions and fault number that a loop or branch carries, as a pytree.

    Args:
        graphs: body of a loop, or branches of a conditional.
        count: number of iterations.
    """

    def __init__(
        self, tracer: SegmentTracer, graphs: Sequence[FunctionalGraph], count: int = 1
    ) -> None:
        effects = Effects()
        for graph in graphs:
            effects.add(graph.effects)
        self._tracer = tracer
        self._stores = list(effects.stores)
        self._streams = [*effects.loads, *effects.stores]
        checked = not tracer.checks.keys().isdisjoint(effects.checks)
        self._checks = checked or bool(tracer.watched)
        self._rounding_index, self._count = tracer.rounding_index, count
        self._roundings_per_iteration = (
            0 if tracer.seed is None else max(graph.num_stochastic_roundings for graph in graphs)
        )

    def snapshot(self) -> Any:
        """Returns the tracer's current stream data, positions and fault number as a pytree."""
        tracer = self._tracer
        return (
            [tracer.streams[s] for s in self._stores],
            [jnp.asarray(tracer.positions[s], jnp.int32) for s in self._streams],
            [jnp.asarray(tracer.fault, jnp.int32)] if self._checks else [],
        )

    def set_final(self, state: Any) -> None:
        """Makes `state`, the state after a loop's last iteration, the tracer's current state."""
        self._restore(state)
        self._tracer.rounding_index = (
            self._rounding_index + self._count * self._roundings_per_iteration
        )

    def _restore(self, state: Any) -> None:
        tracer = self._tracer
        stores, positions, fault = state
        tracer.streams.update(zip(self._stores, stores, strict=True))
        tracer.positions.update(zip(self._streams, positions, strict=True))
        if self._checks:
            (tracer.fault,) = fault

    @contextmanager
    def restored(self, state: Any, iteration: Any = 0) -> Iterator[None]:
        """Context in which the tracer's state is `state`; restores the earlier state afterwards."""
        tracer = self._tracer
        saved_state = dict(tracer.streams), dict(tracer.positions), tracer.fault
        self._restore(state)
        if self._roundings_per_iteration:
            index = jnp.asarray(iteration).astype(jnp.uint32)
            tracer.rounding_index = self._rounding_index + index * jnp.uint32(
                self._roundings_per_iteration
            )
        try:
            yield
        finally:
            tracer.streams, tracer.positions, tracer.fault = saved_state
            tracer.rounding_index = self._rounding_index


class _GraphFrame:
    """Call frame of a graph: its values, and the nodes still to run.

    Args:
        node: the call node; None for the outermost graph.
    """

    def __init__(
        self, node: Node | None, graph: FunctionalGraph, inputs: Sequence[jax.Array]
    ) -> None:
        self.node, self.graph, self.nodes = node, graph, iter(graph.nodes)
        self.values: dict[Value, jax.Array] = dict(zip(graph.inputs, inputs, strict=True))
        self.scopes = ExitStack()


def _is_call(node: Node) -> bool:
    op = node.op
    if op is None or node.kind != "op" or op.defn.lower is not None or op.defn.execute is not None:
        return False
    return node.callee is not None


def _call_results(node: Node, outputs: Sequence[Any]) -> list[Any]:
    """Returns a call node's results, selected from the outputs of the graph that it runs."""
    results = dict(zip(node.regions[0].outputs, outputs, strict=True))
    return [results[i] for i in range(len(node.outputs))]


def _zeros_array(spec: TensorSpec) -> jax.Array:
    return jnp.zeros(spec.shape, spec.dtype.as_jax())


def part_scope(part: str) -> AbstractContextManager[Any]:
    """Context that labels traced ops with a region of the program; "" keeps the current label."""
    return jax.named_scope(f"{PART_SCOPE}<{part}>") if part else nullcontext()
