"""A compiled program: its schedule of host steps, and an executable for each segment.

A run takes the state from the session and returns it; a failed run loses it. Between runs the
session alone owns variables and entries: the program keeps constants, scalars, and pending arrays
until `Program.wait_all`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal
from weakref import finalize

import jax
import numpy as np
from jax.sharding import Mesh

import popdist
from popxl._analysis.effects import Effects, program_effects
from popxl._compile.executable_cache import SegmentCache
from popxl._compile.platforms import get_platform
from popxl._devices.mesh import (
    copy_array,
    create_per_replica_sharding,
    create_replicated_sharding,
    global_shape,
    lowering_target,
)
from popxl._ir.debug_flags import STEPS, STEPWISE, is_debug_flag_set, nonfinite_check_mode
from popxl._ir.host_data import device_view
from popxl._run.schedule_executor import RunGlobals, ScheduleExecutor
from popxl._schedule.buffer_donation import has_exclusive_memory
from popxl._schedule.schedule_builder import build_schedule
from popxl._schedule.schedule_walk import FetchedScalars
from popxl._schedule.segment import ProgramContext, Segment, argument_specs, result_specs
from popxl._storage.buffer_storage import BufferStorage
from popxl._storage.replica_arrays import put_array, put_async
from popxl._storage.shared_memory_mover import InFlightArrays, SharedMemoryMover
from popxl.errors import poplar_application_runtime_error

if TYPE_CHECKING:
    from popxl._ir.op import Op
    from popxl._schedule.schedule import Register, Routine, Schedule
    from popxl._schedule.schedule_walk import Observer
    from popxl._storage.disk_queue import DiskQueue
    from popxl._storage.prefetch import PrefetchMover
    from popxl.ir import Ir
    from popxl.remote_buffer import RemoteBuffer
    from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
    from popxl.tensor import Shard, TensorSpec, Variable
    from popxl.timing import Timing

logger = logging.getLogger("popxl")

_FINITE = (
    "its result has NaN, and none of its inputs has",
    "its result has NaN or infinity, and none of its inputs has",
)
NOTHING_COMPILED: Mapping[str, Any] = {}
_MAX_CACHED_SCALARS = 2**14
_IN_FLIGHT = 64 * 2**20  # bytes, where a load is no copy


@dataclass
class ProgramState:
    """Device state of a program between runs: variables, remote buffers, disk queue.

    Attributes:
        variables: arrays of the variables on the device, or of their shards (see `global_shape`).
        entries: the remote buffers.
        disk_queue: of the folder for entries on disk; None: there are none.
        owns_disk_queue: True if the state closes the queue.
    """

    variables: dict[Variable | Shard, jax.Array] = field(default_factory=dict)
    entries: dict[RemoteBuffer, BufferStorage] = field(default_factory=dict)
    disk_queue: DiskQueue | None = None
    owns_disk_queue: bool = True

    def __post_init__(self) -> None:
        self._closed = (
            None
            if self.disk_queue is None or not self.owns_disk_queue
            else finalize(self, self.disk_queue.close)
        )

    def close(self) -> None:
        """Deletes the state's remote-buffer entries on disk, as its garbage collection does too."""
        for entries in self.entries.values():
            entries.close()
        if self._closed is not None:
            self._closed()

    def run_context(self, main: Routine, fetched: FetchedScalars) -> AbstractContextManager[None]:
        """Context for one run of the program, whose buffer entries on disk are read ahead."""
        if self.disk_queue is None:
            return nullcontext()
        from popxl._schedule.lookahead import lookahead_events

        return self.disk_queue.run_context(
            lookahead_events(main, fetched.subscribe()), self.entries
        )


def make_program_context(
    schedule: Schedule, ir: Ir, target: str, watched: str = ""
) -> ProgramContext:
    """Returns the settings that all segments of a program share.

    Args:
        target: see `ProgramContext`.
        watched: values that no op may return: see `popxl._ir.debug_flags.CHECK`.
    """
    options = ir._pb_ir.getSessionOptions()
    checked = [
        op
        for op in schedule.graph.effects.checks
        if op.defn.check is not None and getattr(options, op.defn.check.option)
    ]
    every = dict.fromkeys(op for graph in ir._graphs for op in graph._ops) if watched else ()
    return ProgramContext(
        checks={op: i for i, op in enumerate(checked, 1)},
        rounding=options.enableStochasticRounding and schedule.graph.num_stochastic_roundings > 0,
        replicas=ir.replication_factor,
        transfers=ir.num_host_transfers,
        target=target,
        watched={op: i for i, op in enumerate(every, len(checked) + 1)},
        infinite=watched == "inf",
    )


class Program:
    """The compiled form of an Ir on a mesh of devices."""

    def __init__(self, ir: Ir, mesh: Mesh) -> None:
        self.ir, self.mesh = ir, mesh
        self.platform = get_platform(mesh.devices.flat[0].platform)
        self.platform.check_version()
        self.effects: Effects = program_effects(ir)
        self.schedule: Schedule = build_schedule(ir)
        self.platform.set_prefetch_window(self.schedule, self.ir.load_window)
        target = lowering_target(self.platform.name, mesh.devices.flat[0])
        self.context = make_program_context(self.schedule, ir, target, nonfinite_check_mode())
        for segment in self.schedule.segments:
            segment.context = self.context
        self.variables: list[Any] = [v.tensor for v in self.schedule.graph.inputs]
        self._launcher = self.platform.create_launcher(ir.replication_factor, ir._num_processes)
        self._scalars: dict[Any, jax.Array] = {}
        self._in_flight = InFlightArrays(_IN_FLIGHT)
        self._mover: SharedMemoryMover | PrefetchMover | None = (
            None  # of the last run, without its entries
        )
        self._is_stepwise = is_debug_flag_set(STEPWISE)
        self.timing: Timing | None = None

    @property
    def changed_variables(self) -> list[Variable | Shard]:
        """Tensors on the devices (variables or shards) that a run can change."""
        return [self.variables[i] for i in self.schedule.graph.changed]

    @property
    def rounds_stochastically(self) -> bool:
        """True if updates of 16-bit variables use stochastic rounding."""
        return self.context.rounding

    @property
    def _runtime_checks(self) -> list[tuple[Op, str]]:
        """Runtime checks of the program, as (op, rule); the n-th is reported as fault number n."""
        rules = [
            (op, op.defn.check.rule) for op in self.context.checks if op.defn.check is not None
        ]
        return [*rules, *((op, _FINITE[self.context.infinite]) for op in self.context.watched)]

    @cached_property
    def input_streams(self) -> list[HostToDeviceStream]:
        return sorted(self.effects.loads, key=lambda s: s.tensor_id)

    @cached_property
    def output_streams(self) -> list[DeviceToHostStream]:
        return sorted(self.effects.stores, key=lambda s: s.tensor_id)

    @cached_property
    def buffers(self) -> list[RemoteBuffer]:
        """Remote buffers that the program uses, or that store variables."""
        used = dict.fromkeys([*self.effects.reads, *self.effects.writes])
        used.update(dict.fromkeys(b for b in self.ir._buffers if b._variables))
        return sorted(used, key=lambda b: b.remote_buffer_id)

    # ---- compiling ------------------------------------------------------------------------------
    def compile(self, compiled: Mapping[str, Any] = NOTHING_COMPILED) -> None:
        """Loads or compiles an executable for each segment; equal segments share one.

        Args:
            compiled: `executable_by_key` of another program on the same devices.
        """
        start, cache = time.perf_counter(), SegmentCache(self)
        keys = {segment: cache.key(segment) for segment in self.schedule.segments}
        first = {keys[s]: s for s in reversed(self.schedule.segments) if keys[s] not in compiled}
        with ThreadPoolExecutor(max(2, os.cpu_count() or 1)) as pool:
            executables = dict(zip(first, pool.map(cache.load, first.values()), strict=True))
            missing = self._keys_missing_in_any_process(executables)
            executables |= zip(
                missing, pool.map(cache.compile, map(first.get, missing)), strict=True
            )
        for _ in range(len(executables) - len(missing)):
            cache.increment_counter("hits")
        self.executable_by_key = {k: executables.get(k) or compiled[k] for k in keys.values()}
        self.executables: dict[Segment, Any] = {
            s: self.executable_by_key[k] for s, k in keys.items()
        }
        seconds = time.perf_counter() - start
        logger.info("compiled or loaded %d executables in %.2f s", len(executables), seconds)

    def _keys_missing_in_any_process(self, loaded: Mapping[str, Any]) -> list[str]:
        """Returns the cache keys of executables that at least one process lacks.

        On GPUs XLA tunes what it compiles together with all processes, and waits for each: all
        compile an executable, or none does.
        """
        is_missing = [executable is None for executable in loaded.values()]
        gathered = (
            popdist.all_gather_object(is_missing, "executables")
            if self.ir._num_processes > 1
            else [is_missing]
        )
        return [key for key, *missing in zip(loaded, *gathered, strict=True) if any(missing)]

    def specs_of(self, segment: Segment) -> tuple[list[Any], list[Any]]:
        """Returns the `ShapeDtypeStruct`s, with shardings, of a segment's arguments and results."""
        sharded = create_per_replica_sharding(self.mesh)
        replicated_sharding = create_replicated_sharding(self.mesh)

        def shape_struct(spec: TensorSpec, private: bool) -> jax.ShapeDtypeStruct:
            shape = global_shape(self.ir.replication_factor, spec.shape) if private else spec.shape
            sharding = sharded if private else replicated_sharding
            return jax.ShapeDtypeStruct(shape, spec.dtype.as_jax(), sharding=sharding)

        arguments = [shape_struct(spec, private) for spec, private in argument_specs(segment)]
        return arguments, [shape_struct(spec, True) for spec in result_specs(segment)]

    def code(self, name: str, stage: Literal["stablehlo", "hlo"]) -> str:
        """Returns the StableHLO or HLO of a segment: see `popxl.Session.code`."""
        segments = {segment.name: segment for segment in self.schedule.segments}
        if name not in segments:
            raise ValueError(f"there is no segment {name!r}; there are {', '.join(segments)}")
        segment = segments[name]
        if stage == "hlo":
            return str(self.executables[segment].as_text())
        from popxl._compile.segment_function import lower_segment

        return str(lower_segment(segment, self.mesh, self.specs_of(segment)[0]).as_text())

    # ---- running --------------------------------------------------------------------------------
    @cached_property
    def _constants(self) -> Mapping[int, jax.Array]:
        replicated_sharding = create_replicated_sharding(self.mesh)
        used = {c._content_key: c._data for s in self.schedule.segments for c in s.constants}
        return {
            content: put_array(device_view(data), replicated_sharding)
            for content, data in used.items()
        }

    def _put_scalar(self, value: int, spec: TensorSpec) -> jax.Array:
        """Copies a host integer to the devices; equal numbers share one device array."""
        key = value, spec.shape, spec.dtype
        if key not in self._scalars:
            if len(self._scalars) > _MAX_CACHED_SCALARS:
                self._scalars.clear()
            array = np.full(spec.shape, value, spec.dtype.as_jax())
            self._scalars[key] = put_async(array, create_replicated_sharding(self.mesh))
        return self._scalars[key]

    def _call_segment(
        self, segment: Segment, arguments: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        results = self._launcher(self.executables[segment], arguments, segment.nbytes)
        if self._is_synchronous:
            jax.block_until_ready(results)
        if segment.effects.impure:
            jax.block_until_ready(results)
            jax.effects_barrier()  # what it prints comes before what later segments print
        return results

    def run(
        self, state: ProgramState, inputs: dict[Any, jax.Array], seed: jax.Array | None
    ) -> dict[Any, jax.Array]:
        """Runs the program once. `state` is changed in place; a failed run loses its values.

        Args:
            inputs: data of the host-to-device streams, (replicas * transfers, *shape).

        Returns:
            Data of the device-to-host streams, likewise.

        Raises:
            poplar_application_runtime_error: an op found a value that breaks its rule.
        """
        run_globals = self._make_globals(inputs, seed)
        fetched, main = FetchedScalars(), self.schedule.main
        mover = self._make_mover(state, fetched)
        observer = self._create_observer(mover)
        executor = ScheduleExecutor(
            self._call_segment, self._put_scalar, copy_array, mover, run_globals, fetched, observer
        )
        variables = [state.variables.pop(v) for v in self.variables]
        unchanged = {self.variables[i]: variables[i] for i in self._unchanged_variable_indices}
        with nullcontext() if self._is_stepwise else state.run_context(main, fetched):
            registers = executor.run(main, variables)
            mover.finish_run()
        self._mover = mover
        state.variables.update(unchanged)
        for i, register, private in self._changed_outputs:
            state.variables[self.variables[i]] = (
                registers[register] if private else copy_array(registers[register])
            )
        if run_globals.fault is not None:
            self._check_faults(run_globals.fault)
        return {s: run_globals.streams[s] for s in self.output_streams}

    @cached_property
    def _changed_outputs(self) -> list[tuple[int, Register, bool]]:
        """Variables that a run changes: (index, output register, True if nothing aliases it).

        The flag is True if nothing else aliases the output.
        """
        main, changed = self.schedule.main, self.schedule.graph.changed
        return [
            (i, main.outputs[k], has_exclusive_memory(main, k, i)) for k, i in enumerate(changed)
        ]

    @cached_property
    def _unchanged_variable_indices(self) -> list[int]:
        """Indices of the variables that a run only reads."""
        changed = set(self.schedule.graph.changed)
        return [i for i in range(len(self.variables)) if i not in changed]

    def _make_mover(
        self, state: ProgramState, fetched: FetchedScalars
    ) -> SharedMemoryMover | PrefetchMover:
        window, main = self.schedule.window, self.schedule.main
        if self._is_synchronous and window is not None:
            window = 0
        return self.platform.make_mover(window, main, fetched, state.entries, self._in_flight)

    def _create_observer(self, mover: SharedMemoryMover | PrefetchMover) -> Observer:
        timer: Observer = iter
        if self._is_stepwise or self.timing is not None:
            from popxl.timing import Timer, Timing

            timer = Timer(self.timing or Timing(synchronize=True), mover)
        if not is_debug_flag_set(STEPS):
            return timer
        from popxl._run.step_log import log_steps

        return lambda steps: timer(log_steps(steps))

    @property
    def _is_synchronous(self) -> bool:
        return self._is_stepwise or (self.timing is not None and self.timing.synchronize)

    def wait_all(self, state: ProgramState | None = None) -> None:
        """Waits until all dispatched work is done and the variables of `state` are ready."""
        if state is not None:
            jax.block_until_ready([x for x in state.variables.values() if not x.is_deleted()])
        self._in_flight.wait_all()
        if self._mover is not None:
            self._mover.wait_all()
        self._launcher.release_arrays()

    @cached_property
    def _replica_zeros(self) -> jax.Array:
        """A zero for each replica, in a device array that is never donated to an executable."""
        zeros = np.zeros(global_shape(self.ir.replication_factor, ()), np.int32)
        return put_array(zeros, create_per_replica_sharding(self.mesh))

    def _make_globals(self, inputs: dict[Any, jax.Array], seed: jax.Array | None) -> RunGlobals:
        replicas, own = self.ir.replication_factor, create_per_replica_sharding(self.mesh)

        def zeros(shape: Sequence[int], dtype: Any) -> jax.Array:
            return put_async(np.zeros(global_shape(replicas, tuple(shape)), dtype), own)

        output_streams = {
            s: zeros((self.ir.num_host_transfers, *s.shape), s.dtype.as_jax())
            for s in self.output_streams
        }
        positions = dict.fromkeys((*self.input_streams, *self.output_streams), self._replica_zeros)
        fault = self._replica_zeros if self._runtime_checks else None
        streams: dict[Stream, jax.Array] = {**inputs, **output_streams}  # type: ignore[dict-item]
        return RunGlobals(streams, positions, self._constants, fault, seed)

    def _check_faults(self, faults: jax.Array) -> None:
        from popxl._run.process_gather import replica_scalars

        rules = self._runtime_checks
        broken = [(i, *rules[int(n) - 1]) for i, n in enumerate(replica_scalars(faults)) if n]
        if broken:  # collectives spread a fault to other replicas
            replica, op, rule = min(broken, key=lambda b: "collective" in b[1].defn.tags)
            raise poplar_application_runtime_error(
                f"graph {op.graph.id!r}, replica {replica}: `{op}` ({op.location}): {rule}"
            )
