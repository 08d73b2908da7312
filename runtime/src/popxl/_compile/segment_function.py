"""JAX function of a segment: `shard_map` over the replicas, traced and lowered."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from popxl._compile.lower_to_jax import SegmentTracer
from popxl._devices.mesh import global_shape
from popxl._schedule.segment import argument_specs, donated_argnums, program_context, result_specs
from popxl.ops._collective import AXIS
from popxl.ops._reductions import tracing_platform

if TYPE_CHECKING:
    from popxl._schedule.segment import Segment
    from popxl.tensor import TensorSpec


def replica_function(segment: Segment) -> Any:
    """Returns the JAX function of a segment on one replica: flat arguments to flat results."""

    def run(*args: Any) -> tuple[Any, ...]:
        values = list(args)

        def take(count: int) -> list[Any]:
            taken, values[:count] = values[:count], []
            return taken

        arguments = take(len(segment.args))
        context = program_context(segment)
        tracer = SegmentTracer(
            checks=context.checks, watched=context.watched, infinite=context.infinite
        )
        tracer.streams.update(zip(segment.streams, take(len(segment.streams)), strict=True))
        tracer.positions.update(zip(segment.streams, take(len(segment.streams)), strict=True))
        contents = [c._content_key for c in segment.constants]
        tracer.constants.update(zip(contents, take(len(contents)), strict=True))
        if segment.has_checks:
            (tracer.fault,) = take(1)
        if segment.rounds_stochastically:
            tracer.seed, tracer.rounding_index = take(2)
        env = dict(zip(segment.args, arguments, strict=True))
        for node in segment.nodes:
            tracer.execute_node(node, env)
        results = [tracer.read_value(v, env) for v in segment.results]
        results += [tracer.streams[s] for s in segment.output_streams]
        results += [jnp.asarray(tracer.positions[s], jnp.int32) for s in segment.streams]
        if segment.has_checks:
            results.append(jnp.asarray(tracer.fault, jnp.int32))
        return tuple(results)

    return run


def global_function(segment: Segment, mesh: Any) -> Any:
    """Returns a segment's JAX function over all replicas, on global arrays (see `global_shape`).

    Arrays of no elements are made on each side: XLA's partitioner crashes where the function of a
    replica takes or returns one.
    """
    local = replica_function(segment)
    arg_specs, out_specs = argument_specs(segment), result_specs(segment)
    nonempty_args = [i for i, (spec, _) in enumerate(arg_specs) if math.prod(spec.shape)]
    nonempty_outs = [i for i, spec in enumerate(out_specs) if math.prod(spec.shape)]

    def per_replica(*args: Any) -> tuple[Any, ...]:
        values = dict(zip(nonempty_args, args, strict=True))
        outs = local(*(localize(values.get(i), *spec) for i, spec in enumerate(arg_specs)))
        return tuple(outs[i] if outs[i].ndim else outs[i][None] for i in nonempty_outs)

    def localize(x: Any, spec: TensorSpec, private: bool) -> Any:
        if x is None:
            return jnp.zeros(spec.shape, spec.dtype.as_jax())
        return x[0] if private and not spec.shape else x

    sharded, replicated = PartitionSpec(AXIS), PartitionSpec()
    mapped = jax.shard_map(
        per_replica,
        mesh=mesh,
        in_specs=tuple(sharded if arg_specs[i][1] else replicated for i in nonempty_args),
        out_specs=sharded,
        check_vma=False,
    )

    def all_replicas(*args: Any) -> tuple[Any, ...]:
        outs = dict(zip(nonempty_outs, mapped(*(args[i] for i in nonempty_args)), strict=True))
        return tuple(
            outs[i] if i in outs
            else jnp.zeros(global_shape(mesh.devices.size, spec.shape), spec.dtype.as_jax())
            for i, spec in enumerate(out_specs)
        )  # fmt: skip

    return all_replicas


def lower_segment(segment: Segment, mesh: Any, specs: Any) -> Any:
    """Traces and lowers a segment to a `jax.stages.Lowered`.

    Args:
        specs: `ShapeDtypeStruct`s with shardings of the arguments.
    """
    mapped = global_function(segment, mesh)

    def popxl_segment(*args: Any) -> Any:
        return mapped(*args)

    # Unused arguments are kept, so that the executable's arguments are exactly the segment's.
    # Without out_shardings XLA would report results without elements as not sharded.
    jitted = jax.jit(
        popxl_segment,
        donate_argnums=donated_argnums(segment),
        keep_unused=True,
        out_shardings=NamedSharding(mesh, PartitionSpec(AXIS)),
    )
    with tracing_platform(program_context(segment).target):
        traced = jitted.trace(*specs)
    return traced.lower()
