"""A whole program: Ir -> one pure JAX function -> one compiled executable.

The function maps (changing state, constant state, host inputs) to (changed state, host outputs).
Changing state is donated, so variables and remote buffers are updated in place. Replicas are one
mesh axis under `shard_map`; each array's first axis is divided among them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from popxl import dtypes
from popxl._core.aliases import modified_owners
from popxl._core.effects import Effects, program_effects
from popxl._lower.cache import statistics
from popxl._lower.collective import AXIS
from popxl._lower.compile import compile_lowered, switches
from popxl._lower.devices import per_replica, replicated
from popxl._lower.hostdata import fetch
from popxl._lower.layout import Layout
from popxl._lower.loops import Loops, has_loops
from popxl._lower.machine import Frame, Machine, execute
from popxl._lower.rounding import count_updates
from popxl._lower.transfers import check_transfers
from popxl.errors import poplar_application_runtime_error
from popxl.ops._folds import tracing_for

if TYPE_CHECKING:
    from popxl.ir import Ir
    from popxl.remote_buffer import RemoteBuffer
    from popxl.streams import DeviceToHostStream, HostToDeviceStream
    from popxl.tensor import Constant

_INLINE_BYTES = 4096


@dataclass
class State:
    """Arrays of the program's state by owner. The same shape of record holds specs or shardings."""

    variables: dict[str, Any] = field(default_factory=dict)
    buffers: dict[int, Any] = field(default_factory=dict)


jax.tree_util.register_dataclass(State, ["variables", "buffers"], [])


class Program:
    """What a session compiles and runs."""

    def __init__(self, ir: Ir, mesh: Mesh) -> None:
        self.ir, self.mesh = ir, mesh
        self.platform = mesh.devices.flat[0].platform
        self.layout = Layout(tiled=self.platform == "tpu")
        self.effects: Effects = program_effects(ir)
        check_transfers(ir)
        changed = modified_owners(ir.main_graph)
        self.variables = [v for v in ir.main_graph.variables if v._remote is None]
        self.changed_variables = [v for v in self.variables if v in changed]
        self.fixed_variables = [v for v in self.variables if v not in changed]
        used = dict.fromkeys([*self.effects.reads, *self.effects.writes])
        used.update(dict.fromkeys(b for b in ir._buffers if b._variables))
        self.buffers: list[RemoteBuffer] = sorted(used, key=lambda b: b.remote_buffer_id)
        self.written = frozenset(self.effects.writes)
        options = ir._pb_ir.getSessionOptions()
        self.checked = [
            op
            for op in self.effects.checks
            if op.defn.check is not None and getattr(options, op.defn.check.option)
        ]
        ordered = self.platform == "cpu" and any(map(has_loops, ir._graphs))
        self.reports = bool(self.checked) or ordered
        self.rounds = options.enableStochasticRounding and count_updates(ir.main_graph) > 0
        self.constants = [c for g in ir._graphs for c in g.constants if is_argument(c)]

    @property
    def h2d(self) -> list[HostToDeviceStream]:
        return sorted(self.effects.loads, key=lambda s: s.tensor_id)

    @property
    def d2h(self) -> list[DeviceToHostStream]:
        return sorted(self.effects.stores, key=lambda s: s.tensor_id)

    # ---- the function ---------------------------------------------------------------------------
    def function(
        self, changing: State, fixed: State, constants: Any, inputs: Any, zero: Any, seed: Any
    ) -> Any:
        """The program of one replica; arrays have this replica's part of the first axis."""
        statistics.traces += 1
        machine = Machine(
            zero=zero,
            guard_reads=self.platform == "cpu",
            written=self.written,
            layout=self.layout,
            checks={op: i for i, op in enumerate(self.checked, 1)},
            seed=seed,
            loops=Loops(zero if self.platform == "cpu" else None),
        )
        frame = Frame(machine)
        for part in (changing, fixed):
            frame.values.update(
                (v, part.variables[v.id][0]) for v in self.variables if v.id in part.variables
            )
            machine.buffers.update(
                (b, part.buffers[b.remote_buffer_id])
                for b in self.buffers
                if b.remote_buffer_id in part.buffers
            )
        machine.constants.update(zip(self.constants, constants, strict=True))
        for source in self.h2d:
            machine.streams[source] = inputs[source.tensor_id][0]
        for sink in self.d2h:
            shape = (self.ir.num_host_transfers, *sink.shape)
            machine.streams[sink] = jnp.zeros(shape, sink.dtype.as_jax())
        machine.positions.update(dict.fromkeys(machine.streams, 0))
        for op in self.ir.main_graph._ops:
            if not op.view:
                execute(frame, op)
        changed = State(
            {v.id: frame.read(v)[None] for v in self.changed_variables},
            {b.remote_buffer_id: machine.buffers[b] for b in self.buffers if b in self.written},
        )
        outputs = {s.tensor_id: machine.streams[s][None] for s in self.d2h}
        found = machine.fault + machine.loops.kept
        return changed, outputs, jnp.full(1, found, jnp.int32) if self.reports else None

    # ---- arguments ------------------------------------------------------------------------------
    def buffer_shape(self, b: RemoteBuffer) -> tuple[int, ...]:
        """Shape of the array of all replicas."""
        return (self.ir.replication_factor * b.entries, *self.layout.stored_shape(b))

    def _state_specs(self, changing: bool) -> State:
        r, mesh = self.ir.replication_factor, self.mesh
        variables = self.changed_variables if changing else self.fixed_variables
        return State(
            {v.id: _spec((r, *v.shape), v.dtype, per_replica(mesh)) for v in variables},
            {
                b.remote_buffer_id: _spec(
                    self.buffer_shape(b), b.tensor_dtype, per_replica(mesh, host=True)
                )
                for b in self.buffers
                if (b in self.written) == changing
            },
        )

    @cached_property
    def argument_specs(self) -> tuple[Any, ...]:
        """`ShapeDtypeStruct`s with shardings: changing, fixed, constants, inputs, zero, seed
        (None if nothing is rounded at random)."""
        r, t = self.ir.replication_factor, self.ir.num_host_transfers
        whole = replicated(self.mesh)
        return (
            self._state_specs(True),
            self._state_specs(False),
            [_spec(c.shape, c.dtype, whole) for c in self.constants],
            {
                s.tensor_id: _spec((r, t, *s.shape), s.dtype, per_replica(self.mesh))
                for s in self.h2d
            },
            jax.ShapeDtypeStruct((), np.int32, sharding=whole),
            jax.ShapeDtypeStruct((2,), np.uint32, sharding=whole) if self.rounds else None,
        )

    @property
    def result_specs(self) -> tuple[Any, ...]:
        """`ShapeDtypeStruct`s with shardings: changed state, outputs, number of the op that broke
        its rule on each replica, or 0; None if the program does not report."""
        r, t = self.ir.replication_factor, self.ir.num_host_transfers
        changed = self._state_specs(True)
        outputs = {
            s.tensor_id: _spec((r, t, *s.shape), s.dtype, per_replica(self.mesh)) for s in self.d2h
        }
        report = _spec((r,), dtypes.int32, per_replica(self.mesh)) if self.reports else None
        return changed, outputs, report

    def check_faults(self, faults: Any) -> None:
        """Raise poplar_application_runtime_error if a run has found that an op broke its rule."""
        for replica, number in enumerate(fetch(faults) if self.checked else []):
            if number:
                op = self.checked[int(number) - 1]
                assert op.defn.check is not None
                raise poplar_application_runtime_error(
                    f"graph {op.graph.id!r}, replica {replica}: `{op}` ({op.location}): "
                    f"{op.defn.check.rule}"
                )

    # ---- compiling ------------------------------------------------------------------------------
    def lower(self, target: str | None = None) -> Any:
        """Trace and lower: a `jax.stages.Lowered`.

        Args:
            target: platform to lower for ("cpu", "cuda", "tpu"); default: that of the mesh.
        """
        split, whole = PartitionSpec(AXIS), PartitionSpec()
        mapped = jax.shard_map(
            self.function,
            mesh=self.mesh,
            in_specs=(split, split, whole, split, whole, whole),
            out_specs=split,
            check_vma=False,
        )

        def popxl_program(*args: Any) -> Any:
            return mapped(*args)

        # Unused arguments are kept, so that the executable's arguments are exactly the program's.
        jitted = jax.jit(popxl_program, donate_argnums=(0,), keep_unused=True)
        with tracing_for(target or self.platform):
            traced = jitted.trace(*self.argument_specs)
        return traced.lower(lowering_platforms=None if target is None else (target,))

    def compile(self) -> Any:
        """Lower and compile: a `jax.stages.Compiled`."""
        statistics.compiles += 1
        return compile_lowered(self.lower(), self.platform)

    @property
    def switches(self) -> dict[str, Any]:
        return switches(self.platform)


def is_argument(constant: Constant) -> bool:
    """Whether a constant is passed as an argument, and not written into the program."""
    return constant._data.nbytes > _INLINE_BYTES


def _spec(shape: Any, dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype.as_jax(), sharding=sharding)
