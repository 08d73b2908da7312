"""Executor of schedules: dispatches the host's steps and waits only where a step needs a result.

JAX runs dispatched work in the background, so the executor can dispatch the loads of the next layer
while the devices still compute the current one. It waits for scalars that the host needs, and when
more than a limit of bytes is pending. A mover decides when entries move
(`popxl._storage.shared_memory_mover`, `popxl._storage.prefetch`).

One thread executes the schedule and owns registers, state and entries. Other threads only launch
executables for it (`popxl._devices.cpu.CpuLauncher`), and read and write files
(`popxl._storage.disk_queue`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from popxl._schedule.schedule import (
    Branch,
    Compute,
    Fetch,
    Load,
    Loop,
    Routine,
    Run,
    Step,
    Store,
)
from popxl._schedule.schedule_walk import Frame, compute_scalars, walk_steps
from popxl._schedule.segment import ROUNDING_COUNT
from popxl.errors import add_error_location, popart_exception

if TYPE_CHECKING:
    from popxl._schedule.schedule import Index
    from popxl._schedule.schedule_walk import FetchedScalars, Observer
    from popxl._schedule.segment import Segment
    from popxl._storage.prefetch import PrefetchMover
    from popxl._storage.shared_memory_mover import SharedMemoryMover
    from popxl.streams import Stream


@dataclass
class RunGlobals:
    """Streams, constants, fault and seed, which a run's segments take besides schedule registers.

    Attributes:
        streams: data of each stream, (replicas * transfers, *shape).
        positions: the next transfer of each stream, (replicas,).
        constants: large constants on the devices, by `Constant._content_key`.
        fault: number of the first op that broke its rule on each replica, or None.
        seed: seed of stochastic rounding, or None.
    """

    streams: dict[Stream, jax.Array]
    positions: dict[Stream, jax.Array]
    constants: Mapping[int, jax.Array]
    fault: jax.Array | None = None
    seed: jax.Array | None = None


def fetch_scalar(array: jax.Array) -> Index:
    """Waits for a device scalar and returns it as an int; a tuple if replicas differ."""
    from popxl._run.process_gather import replica_scalars

    values = tuple(int(x.item()) for x in replica_scalars(array))
    return values[0] if len(set(values)) == 1 else values


class ScheduleExecutor:
    """Executes the schedule of a program once.

    Args:
        call: runs a segment: `call(segment, arguments) -> results`.
        put_scalar: puts a scalar on the devices: `put_scalar(value, spec) -> array`.
        copy: copies an array.
        fetched: receives the fetched scalars.
        observer: passes the steps on, see `popxl._schedule.schedule_walk`.
        fetch: waits for a number: `fetch(array) -> number`.
    """

    def __init__(
        self,
        call: Callable[[Segment, Sequence[jax.Array]], Sequence[jax.Array]],
        put_scalar: Callable[[int, Any], jax.Array],
        copy: Callable[[jax.Array], jax.Array],
        mover: SharedMemoryMover | PrefetchMover,
        run_globals: RunGlobals,
        fetched: FetchedScalars,
        observer: Observer = iter,
        fetch: Callable[[jax.Array], Index] = fetch_scalar,
    ) -> None:
        self._call, self._put_scalar, self._copy, self._fetch_scalar = call, put_scalar, copy, fetch
        self._mover, self._run_globals, self._fetched = mover, run_globals, fetched
        self._observer = observer
        self._handlers: dict[type[Step], Callable[[Any, Frame], None]] = {
            Load: self._execute_load,
            Store: self._execute_store,
            Compute: compute_scalars,
            Fetch: self._execute_fetch,
            Run: self._execute_run,
            Loop: lambda *_: None,  # the steps inside follow
            Branch: self._check_condition,
        }

    def run(self, main: Routine, inputs: list[Any]) -> list[Any]:
        """Runs the schedule; returns the main routine's register values. `inputs` is emptied."""
        main_frame, handlers = Frame(main, inputs), self._handlers
        step, frame = None, main_frame
        try:
            for step, frame in self._observer(walk_steps(main_frame, self._copy)):
                handlers[type(step)](step, frame)
        except BaseException as error:
            if step is not None:
                add_error_location(
                    error, f"{frame.format_step(step)}, of {frame.routine.title}", step.location
                )
            raise
        return main_frame.registers

    # ---- steps ----------------------------------------------------------------------------------
    def _execute_load(self, step: Load, frame: Frame) -> None:
        frame.registers[step.out] = self._mover.load(step, frame.registers[step.entry_index])

    def _execute_store(self, step: Store, frame: Frame) -> None:
        self._mover.store(step, frame.registers[step.entry_index], frame.registers[step.value])

    def _execute_fetch(self, step: Fetch, frame: Frame) -> None:
        scalar = self._fetch_scalar(frame.registers[step.value])
        frame.registers[step.out] = scalar
        self._fetched.append(scalar)

    def _check_condition(self, step: Branch, frame: Frame) -> None:
        condition = frame.registers[step.condition]
        if isinstance(condition, tuple):
            raise popart_exception(
                "the condition of a conditional whose branches move entries of remote buffers "
                f"differs between replicas: {condition}; it must be the same on all of them"
            )

    def _execute_run(self, step: Run, frame: Frame) -> None:
        self._mover.before_run(step)
        segment, run_globals, registers = step.segment, self._run_globals, frame.registers
        arguments = [registers[s] for s in step.args]
        for i in segment.scalar_args:
            arguments[i] = self._put_scalar(arguments[i], segment.args[i].spec)
        arguments += [run_globals.streams[s] for s in segment.streams]
        arguments += [run_globals.positions[s] for s in segment.streams]
        arguments += [run_globals.constants[c._content_key] for c in segment.constants]
        if segment.has_checks:
            arguments.append(run_globals.fault)
        if segment.rounds_stochastically:
            arguments += [
                run_globals.seed,
                self._put_scalar(frame.rounding_offset + step.rounding_offset, ROUNDING_COUNT),
            ]
        for register in step.dead_registers:
            registers[register] = None
        results = self._call(segment, arguments)
        arguments.clear()
        result_registers = step.outs
        for register, array in zip(result_registers, results, strict=False):
            registers[register] = array
        remaining = iter(results[len(result_registers) :])
        for stream in segment.output_streams:
            run_globals.streams[stream] = next(remaining)
        for stream in segment.streams:
            run_globals.positions[stream] = next(remaining)
        if segment.has_checks:
            run_globals.fault = next(remaining)
        self._mover.after_run(step, results)
