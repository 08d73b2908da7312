"""Runs a schedule: the host goes ahead of the devices, and waits only where it has to.

JAX runs what it is asked to in the background. So the walker asks for the next layer's entries
while the devices still compute the current one; it waits for values that it has to know, and when
arrays of more than a limit of bytes were asked for and are not there yet. A mover decides when
entries move (`popxl._storage.in_place_mover`).

One thread walks, and alone has slots, state and entries. Others only launch what it waits for
(`popxl._devices.cpu.Launcher`), and read and write files (`popxl._storage.disk_queue`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from popxl._run.process_gather import numbers
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
from popxl._schedule.schedule_walk import Activation, compute, walk
from popxl._schedule.segment import COUNT
from popxl.errors import locate, popart_exception

if TYPE_CHECKING:
    from popxl._schedule.lookahead import Fetched
    from popxl._schedule.schedule import Index
    from popxl._schedule.schedule_walk import Observer
    from popxl._schedule.segment import Segment
    from popxl._storage.in_place_mover import Direct
    from popxl._storage.prefetch import Transit
    from popxl.streams import Stream


@dataclass
class Globals:
    """What segments use besides their arguments, in one run.

    Attributes:
        streams: data of each stream, (replicas * transfers, *shape).
        positions: the next transfer of each stream, (replicas,).
        constants: large constants on the devices, by `Constant._content`.
        fault: number of the first op that broke its rule on each replica, or None.
        seed: of random rounding, or None.
    """

    streams: dict[Stream, jax.Array]
    positions: dict[Stream, jax.Array]
    constants: Mapping[int, jax.Array]
    fault: jax.Array | None = None
    seed: jax.Array | None = None


def fetched_number(array: jax.Array) -> Index:
    """The number that an array holds, once it is there; one for each replica where they differ."""
    values = tuple(int(x.item()) for x in numbers(array))
    return values[0] if len(set(values)) == 1 else values


class Walker:
    """One run of a program.

    Args:
        call: runs a segment: `call(segment, arguments) -> results`.
        number: brings a number to the devices: `number(value, spec) -> array`.
        copy: an array of its own memory with the same values.
        fetched: is told the numbers that are fetched.
        observer: passes the steps on, see `popxl._schedule.schedule_walk`.
        fetch: waits for a number: `fetch(array) -> number`.
    """

    def __init__(
        self,
        call: Callable[[Segment, Sequence[jax.Array]], Sequence[jax.Array]],
        number: Callable[[int, Any], jax.Array],
        copy: Callable[[jax.Array], jax.Array],
        moving: Direct | Transit,
        shared: Globals,
        fetched: Fetched,
        observer: Observer = iter,
        fetch: Callable[[jax.Array], Index] = fetched_number,
    ) -> None:
        self._call, self._number, self._copy, self._fetch_number = call, number, copy, fetch
        self._moving, self._shared, self._fetched = moving, shared, fetched
        self._observer = observer
        self._do: dict[type[Step], Callable[[Any, Activation], None]] = {
            Load: self._load,
            Store: self._store,
            Compute: compute,
            Fetch: self._fetch,
            Run: self._run,
            Loop: lambda *_: None,  # the steps inside follow
            Branch: self._check_condition,
        }

    def run(self, main: Routine, inputs: list[Any]) -> list[Any]:
        """Run the program; returns the slots of its main routine. `inputs` is emptied."""
        activation, do = Activation(main, inputs), self._do
        step, at = None, activation
        try:
            for step, at in self._observer(walk(activation, self._copy)):
                do[type(step)](step, at)
        except BaseException as error:
            if step is not None:
                locate(error, f"{at.text_of(step)}, of {at.routine.title}", step.location)
            raise
        return activation.slots

    # ---- steps ----------------------------------------------------------------------------------
    def _load(self, step: Load, at: Activation) -> None:
        at.slots[step.out] = self._moving.load(step, at.slots[step.at])

    def _store(self, step: Store, at: Activation) -> None:
        self._moving.store(step, at.slots[step.at], at.slots[step.value])

    def _fetch(self, step: Fetch, at: Activation) -> None:
        number = self._fetch_number(at.slots[step.value])
        at.slots[step.out] = number
        self._fetched.append(number)

    def _check_condition(self, step: Branch, at: Activation) -> None:
        condition = at.slots[step.condition]
        if isinstance(condition, tuple):
            raise popart_exception(
                "the condition of a conditional whose branches move entries of remote buffers "
                f"differs between replicas: {condition}; it must be the same on all of them"
            )

    def _run(self, step: Run, at: Activation) -> None:
        self._moving.run(step)
        segment, shared, slots = step.segment, self._shared, at.slots
        arguments = [slots[s] for s in step.args]
        for i in segment.numbers:
            arguments[i] = self._number(arguments[i], segment.args[i].spec)
        arguments += [shared.streams[s] for s in segment.streams]
        arguments += [shared.positions[s] for s in segment.streams]
        arguments += [shared.constants[c._content] for c in segment.constants]
        if segment.is_checked:
            arguments.append(shared.fault)
        if segment.is_rounded:
            arguments += [shared.seed, self._number(at.updates + step.updates, COUNT)]
        for slot in step.last:
            slots[slot] = None
        results = self._call(segment, arguments)
        arguments.clear()
        slots_of = step.outs
        for slot, array in zip(slots_of, results, strict=False):
            slots[slot] = array
        rest = iter(results[len(slots_of) :])
        for stream in segment.sinks:
            shared.streams[stream] = next(rest)
        for stream in segment.streams:
            shared.positions[stream] = next(rest)
        if segment.is_checked:
            shared.fault = next(rest)
        self._moving.ran(step, results)
