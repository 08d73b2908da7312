"""The function of a segment, as JAX traces and XLA compiles it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from popxl._compile.machine import Machine
from popxl._schedule.segment import argument_specs, donated, facts_of
from popxl.ops._collective import AXIS
from popxl.ops._folds import tracing_for

if TYPE_CHECKING:
    from popxl._schedule.segment import Segment


def replica_function(segment: Segment) -> Any:
    """The function of one replica: flat arguments to flat results, as their specs say."""

    def run(*given: Any) -> tuple[Any, ...]:
        values = list(given)

        def take(count: int) -> list[Any]:
            taken, values[:count] = values[:count], []
            return taken

        arguments = take(len(segment.args))
        facts = facts_of(segment)
        machine = Machine(checks=facts.checks, watched=facts.watched, infinite=facts.infinite)
        machine.streams.update(zip(segment.streams, take(len(segment.streams)), strict=True))
        machine.positions.update(zip(segment.streams, take(len(segment.streams)), strict=True))
        contents = [c._content for c in segment.constants]
        machine.constants.update(zip(contents, take(len(contents)), strict=True))
        if segment.is_checked:
            (machine.fault,) = take(1)
        if segment.is_rounded:
            machine.seed, machine.updates = take(2)
        env = dict(zip(segment.args, arguments, strict=True))
        for node in segment.nodes:
            machine.execute(node, env)
        results = [machine.read(v, env) for v in segment.results]
        results += [machine.streams[s] for s in segment.sinks]
        results += [jnp.asarray(machine.positions[s], jnp.int32) for s in segment.streams]
        if segment.is_checked:
            results.append(jnp.asarray(machine.fault, jnp.int32))
        return tuple(results)

    return run


def global_function(segment: Segment, mesh: Any) -> Any:
    """The function of all replicas, on arrays as `global_shape` says."""
    local = replica_function(segment)
    specs = argument_specs(segment)
    own = [private for _, private in specs]
    scalars = [private and not spec.shape for spec, private in specs]

    def per_replica(*given: Any) -> tuple[Any, ...]:
        results = local(*(x[0] if s else x for x, s in zip(given, scalars, strict=True)))
        return tuple(x if x.ndim else x[None] for x in results)

    split, whole = PartitionSpec(AXIS), PartitionSpec()
    return jax.shard_map(
        per_replica,
        mesh=mesh,
        in_specs=tuple(split if private else whole for private in own),
        out_specs=split,
        check_vma=False,
    )


def lower_segment(segment: Segment, mesh: Any, specs: Any) -> Any:
    """Trace and lower: a `jax.stages.Lowered`.

    Args:
        specs: `ShapeDtypeStruct`s with shardings of the arguments.
    """
    mapped = global_function(segment, mesh)

    def popxl_segment(*args: Any) -> Any:
        return mapped(*args)

    # Unused arguments are kept, so that the executable's arguments are exactly the segment's.
    # XLA would say that results of no elements are not cut.
    jitted = jax.jit(
        popxl_segment,
        donate_argnums=donated(segment),
        keep_unused=True,
        out_shardings=NamedSharding(mesh, PartitionSpec(AXIS)),
    )
    with tracing_for(facts_of(segment).target):
        traced = jitted.trace(*specs)
    return traced.lower()
