"""A whole program, compiled: its schedule, and an executable for each segment.

A run takes the state from the session and gives it back; if it fails, the state is gone. After a
run the session alone has variables and entries: the program keeps constants, numbers, and arrays
that are on their way until `Program.settle`.
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
from popxl._compile.platforms import platform_named
from popxl._compile.segment_function import lower_segment
from popxl._devices.mesh import copied, global_shape, per_replica, replicated, target_of
from popxl._ir.debug_flags import STEPS, STEPWISE, checked_values, is_on
from popxl._ir.host_data import device_view
from popxl._run.process_gather import numbers
from popxl._run.schedule_executor import Globals, Walker
from popxl._run.step_log import logged
from popxl._run.timing import Timer, Timing
from popxl._schedule.buffer_donation import is_exclusive
from popxl._schedule.lookahead import Fetched, upcoming
from popxl._schedule.schedule_builder import build_schedule
from popxl._schedule.segment import Facts, Segment, argument_specs, result_specs
from popxl._storage.buffer_storage import Entries
from popxl._storage.disk_queue import Traffic
from popxl._storage.in_place_mover import Direct, InFlight
from popxl._storage.prefetch import Transit
from popxl._storage.replica_arrays import put, sent
from popxl.errors import poplar_application_runtime_error

if TYPE_CHECKING:
    from popxl._ir.op import Op
    from popxl._schedule.schedule import Routine, Schedule, Slot
    from popxl._schedule.schedule_walk import Observer
    from popxl.ir import Ir
    from popxl.remote_buffer import RemoteBuffer
    from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
    from popxl.tensor import Shard, TensorSpec, Variable

logger = logging.getLogger("popxl")

_FINITE = (
    "its result has NaN, and none of its inputs has",
    "its result has NaN or infinity, and none of its inputs has",
)
_NUMBERS_KEPT = 2**14
_IN_FLIGHT = 64 * 2**20  # bytes, where a load is no copy


@dataclass
class State:
    """What a program changes and keeps from run to run.

    Attributes:
        variables: arrays of the variables on the device, or of their shards (see `global_shape`).
        entries: the remote buffers.
        traffic: of the folder for entries on disk; None: there are none.
    """

    variables: dict[Variable | Shard, jax.Array] = field(default_factory=dict)
    entries: dict[RemoteBuffer, Entries] = field(default_factory=dict)
    traffic: Traffic | None = None

    def __post_init__(self) -> None:
        self._closed = None if self.traffic is None else finalize(self, self.traffic.close)

    def close(self) -> None:
        """Remove the entries on disk. Also done, some time, when nobody has the state any more."""
        for entries in self.entries.values():
            entries.close()
        if self._closed is not None:
            self._closed()

    def running(self, main: Routine, fetched: Fetched) -> AbstractContextManager[None]:
        """A context for a run of the program."""
        if self.traffic is None:
            return nullcontext()
        return self.traffic.run(upcoming(main, fetched.followed()), self.entries)


def facts_of_program(schedule: Schedule, ir: Ir, target: str, watched: str = "") -> Facts:
    """What the program of `ir` says to its segments.

    Args:
        target: see `Facts`.
        watched: what no op may make: see `popxl._ir.debug_flags.CHECK`.
    """
    options = ir._pb_ir.getSessionOptions()
    checked = [
        op
        for op in schedule.graph.effects.checks
        if op.defn.check is not None and getattr(options, op.defn.check.option)
    ]
    every = dict.fromkeys(op for graph in ir._graphs for op in graph._ops) if watched else ()
    return Facts(
        checks={op: i for i, op in enumerate(checked, 1)},
        rounding=options.enableStochasticRounding and schedule.graph.updates > 0,
        replicas=ir.replication_factor,
        transfers=ir.num_host_transfers,
        target=target,
        watched={op: i for i, op in enumerate(every, len(checked) + 1)},
        infinite=watched == "inf",
    )


class Program:
    """What a session compiles and runs."""

    def __init__(self, ir: Ir, mesh: Mesh) -> None:
        self.ir, self.mesh = ir, mesh
        self.platform = platform_named(mesh.devices.flat[0].platform)
        self.platform.check()
        self.effects: Effects = program_effects(ir)
        self.schedule: Schedule = build_schedule(ir)
        self.platform.look_at(self.schedule, self.ir.load_window)
        target = target_of(self.platform.name, mesh.devices.flat[0])
        self.facts = facts_of_program(self.schedule, ir, target, checked_values())
        for segment in self.schedule.segments:
            segment.facts = self.facts
        self.variables: list[Any] = [v.tensor for v in self.schedule.graph.inputs]
        self._launcher = self.platform.launcher(ir.replication_factor, ir._instances)
        self._numbers: dict[Any, jax.Array] = {}
        self._in_flight = InFlight(_IN_FLIGHT)
        self._moving: Direct | Transit | None = None  # of the last run, without its entries
        self._is_stepwise = is_on(STEPWISE)
        self.timing: Timing | None = None

    @property
    def changed(self) -> list[Variable | Shard]:
        """The variables on the device that a run may change."""
        return [self.variables[i] for i in self.schedule.graph.changed]

    @property
    def rounds(self) -> bool:
        """Whether updates of 16-bit variables round at random."""
        return self.facts.rounding

    @property
    def _rules(self) -> list[tuple[Op, str]]:
        """Ops whose values are checked, each with its rule; number n of a fault is the n-th."""
        rules = [(op, op.defn.check.rule) for op in self.facts.checks if op.defn.check is not None]
        return [*rules, *((op, _FINITE[self.facts.infinite]) for op in self.facts.watched)]

    @cached_property
    def h2d(self) -> list[HostToDeviceStream]:
        return sorted(self.effects.loads, key=lambda s: s.tensor_id)

    @cached_property
    def d2h(self) -> list[DeviceToHostStream]:
        return sorted(self.effects.stores, key=lambda s: s.tensor_id)

    @cached_property
    def buffers(self) -> list[RemoteBuffer]:
        """The buffers that the program uses or that variables live in."""
        used = dict.fromkeys([*self.effects.reads, *self.effects.writes])
        used.update(dict.fromkeys(b for b in self.ir._buffers if b._variables))
        return sorted(used, key=lambda b: b.remote_buffer_id)

    # ---- compiling ------------------------------------------------------------------------------
    def compile(self) -> None:
        """Load or compile an executable for each segment; equal segments share one."""
        start, cache = time.perf_counter(), SegmentCache(self)
        keys = {segment: cache.key(segment) for segment in self.schedule.segments}
        first = {keys[s]: s for s in reversed(self.schedule.segments)}
        with ThreadPoolExecutor(max(2, os.cpu_count() or 1)) as pool:
            made = dict(zip(first, pool.map(cache.load, first.values()), strict=True))
            missing = self._missing_anywhere(made)
            made |= zip(missing, pool.map(cache.compile, map(first.get, missing)), strict=True)
        for _ in range(len(made) - len(missing)):
            cache.count("hits")
        self.executables: dict[Segment, Any] = {s: made[k] for s, k in keys.items()}
        seconds = time.perf_counter() - start
        logger.info("compiled or loaded %d executables in %.2f s", len(made), seconds)

    def _missing_anywhere(self, loaded: Mapping[str, Any]) -> list[str]:
        """The keys of what a process has not loaded, of any process that runs the program.

        On GPUs XLA tunes what it compiles together with all processes, and waits for each: all
        compile an executable, or none does.
        """
        own = [executable is None for executable in loaded.values()]
        everyones = popdist.gather(own, "executables") if self.ir._instances > 1 else [own]
        return [key for key, *lacks in zip(loaded, *everyones, strict=True) if any(lacks)]

    def specs_of(self, segment: Segment) -> tuple[list[Any], list[Any]]:
        """`ShapeDtypeStruct`s with shardings of a segment's arguments and results."""
        own, whole = per_replica(self.mesh), replicated(self.mesh)

        def struct(spec: TensorSpec, private: bool) -> jax.ShapeDtypeStruct:
            shape = global_shape(self.ir.replication_factor, spec.shape) if private else spec.shape
            sharding = own if private else whole
            return jax.ShapeDtypeStruct(shape, spec.dtype.as_jax(), sharding=sharding)

        arguments = [struct(spec, private) for spec, private in argument_specs(segment)]
        return arguments, [struct(spec, True) for spec in result_specs(segment)]

    def code(self, name: str, stage: Literal["stablehlo", "hlo"]) -> str:
        """What a segment is to XLA: see `popxl.Session.code`."""
        segments = {segment.name: segment for segment in self.schedule.segments}
        if name not in segments:
            raise ValueError(f"there is no segment {name!r}; there are {', '.join(segments)}")
        segment = segments[name]
        if stage == "hlo":
            return str(self.executables[segment].as_text())
        return str(lower_segment(segment, self.mesh, self.specs_of(segment)[0]).as_text())

    # ---- running --------------------------------------------------------------------------------
    @cached_property
    def _constants(self) -> Mapping[int, jax.Array]:
        whole = replicated(self.mesh)
        used = {c._content: c._data for s in self.schedule.segments for c in s.constants}
        return {content: put(device_view(data), whole) for content, data in used.items()}

    def _number(self, value: int, spec: TensorSpec) -> jax.Array:
        """A number of the host on the devices; numbers come again, so they are kept."""
        key = value, spec.shape, spec.dtype
        if key not in self._numbers:
            if len(self._numbers) > _NUMBERS_KEPT:
                self._numbers.clear()
            array = np.full(spec.shape, value, spec.dtype.as_jax())
            self._numbers[key] = sent(array, replicated(self.mesh))
        return self._numbers[key]

    def _call(self, segment: Segment, arguments: Sequence[jax.Array]) -> Sequence[jax.Array]:
        results = self._launcher(self.executables[segment], arguments, segment.nbytes)
        if self._is_apart:
            jax.block_until_ready(results)
        if segment.effects.impure:
            jax.block_until_ready(results)
            jax.effects_barrier()  # what it prints comes before what later segments print
        return results

    def run(
        self, state: State, inputs: dict[Any, jax.Array], seed: jax.Array | None
    ) -> dict[Any, jax.Array]:
        """Run the program once. `state` is changed; it is lost if the run fails.

        Args:
            inputs: data of the host-to-device streams, (replicas * transfers, *shape).

        Returns:
            Data of the device-to-host streams, likewise.

        Raises:
            poplar_application_runtime_error: an op found a value that breaks its rule.
        """
        shared = self._globals(inputs, seed)
        fetched, main = Fetched(), self.schedule.main
        moving = self._mover(state, fetched)
        observer = self._observer(moving)
        walker = Walker(self._call, self._number, copied, moving, shared, fetched, observer)
        given = [state.variables.pop(v) for v in self.variables]
        kept = {self.variables[i]: given[i] for i in self._unchanged}
        with nullcontext() if self._is_stepwise else state.running(main, fetched):
            slots = walker.run(main, given)
            moving.finish()
        self._moving = moving
        state.variables.update(kept)
        for i, slot, private in self._changes:
            state.variables[self.variables[i]] = slots[slot] if private else copied(slots[slot])
        if shared.fault is not None:
            self._check_faults(shared.fault)
        return {s: shared.streams[s] for s in self.d2h}

    @cached_property
    def _changes(self) -> list[tuple[int, Slot, bool]]:
        """Variables that a run changes, the slots that they end in, and if they alone do."""
        main, changed = self.schedule.main, self.schedule.graph.changed
        return [(i, main.outputs[k], is_exclusive(main, k, i)) for k, i in enumerate(changed)]

    @cached_property
    def _unchanged(self) -> list[int]:
        """Variables that a run only reads."""
        changed = set(self.schedule.graph.changed)
        return [i for i in range(len(self.variables)) if i not in changed]

    def _mover(self, state: State, fetched: Fetched) -> Direct | Transit:
        window, main = self.schedule.window, self.schedule.main
        if self._is_apart and window is not None:
            window = 0
        return self.platform.moving(window, main, fetched, state.entries, self._in_flight)

    def _observer(self, moving: Direct | Transit) -> Observer:
        timing = Timing(apart=True) if self._is_stepwise and self.timing is None else self.timing
        timer = iter if timing is None else Timer(timing, moving)
        return (lambda steps: timer(logged(steps))) if is_on(STEPS) else timer

    @property
    def _is_apart(self) -> bool:
        return self._is_stepwise or (self.timing is not None and self.timing.apart)

    def settle(self, state: State | None = None) -> None:
        """Wait until the devices have done what runs have asked for, and changed in `state`."""
        if state is not None:
            jax.block_until_ready([x for x in state.variables.values() if not x.is_deleted()])
        self._in_flight.settle()
        if self._moving is not None:
            self._moving.settle()
        self._launcher.settle()

    @cached_property
    def _zero(self) -> jax.Array:
        """A zero for each replica, which no segment is donated."""
        zeros = np.zeros(global_shape(self.ir.replication_factor, ()), np.int32)
        return put(zeros, per_replica(self.mesh))

    def _globals(self, inputs: dict[Any, jax.Array], seed: jax.Array | None) -> Globals:
        replicas, own = self.ir.replication_factor, per_replica(self.mesh)

        def zeros(shape: Sequence[int], dtype: Any) -> jax.Array:
            return sent(np.zeros(global_shape(replicas, tuple(shape)), dtype), own)

        sinks = {
            s: zeros((self.ir.num_host_transfers, *s.shape), s.dtype.as_jax()) for s in self.d2h
        }
        positions = dict.fromkeys((*self.h2d, *self.d2h), self._zero)
        fault = self._zero if self._rules else None
        streams: dict[Stream, jax.Array] = {**inputs, **sinks}  # type: ignore[dict-item]
        return Globals(streams, positions, self._constants, fault, seed)

    def _check_faults(self, faults: jax.Array) -> None:
        rules = self._rules
        broken = [(i, *rules[int(n) - 1]) for i, n in enumerate(numbers(faults)) if n]
        if broken:  # what one replica made, collectives bring to others
            replica, op, rule = min(broken, key=lambda b: "collective" in b[1].defn.tags)
            raise poplar_application_runtime_error(
                f"graph {op.graph.id!r}, replica {replica}: `{op}` ({op.location}): {rule}"
            )
