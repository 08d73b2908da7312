"""Runs a schedule: the host goes ahead of the devices, and waits only where it has to.

JAX runs what it is asked to in the background. So the walker asks for the next layer's entries
while the devices still compute the current one; it waits for values that it has to know, and when
arrays of more than a limit of bytes were asked for and are not there yet. A mover decides when
entries move (`popxl._storage.moving`).

One thread walks, and alone has slots, state and entries. Others only launch what it waits for
(`popxl._devices.cpu.Launcher`), and read and write files (`popxl._storage.disk_traffic`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from popxl._run.exchange import numbers
from popxl._schedule.schedule import (
    Branch,
    Compute,
    Fetch,
    Load,
    Loop,
    Passed,
    Routine,
    Run,
    Step,
    Store,
)
from popxl._schedule.segment import COUNT
from popxl.errors import popart_exception

if TYPE_CHECKING:
    from popxl._schedule.lookahead import Fetched
    from popxl._schedule.segment import Segment
    from popxl._storage.moving import Direct
    from popxl._storage.transit import Transit
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


class Walker:
    """One run of a program.

    Args:
        call: runs a segment: `call(segment, arguments) -> results`.
        number: brings a number to the devices: `number(value, spec) -> array`.
        copy: an array of its own memory with the same values.
        fetched: is told the numbers that are fetched.
    """

    def __init__(
        self,
        call: Callable[[Segment, Sequence[jax.Array]], Sequence[jax.Array]],
        number: Callable[[int, Any], jax.Array],
        copy: Callable[[jax.Array], jax.Array],
        moving: Direct | Transit,
        shared: Globals,
        fetched: Fetched,
    ) -> None:
        self._call, self._number, self._copy = call, number, copy
        self._moving, self._shared, self._fetched = moving, shared, fetched
        self._do: dict[type[Step], Callable[[Any, list[Any], int], None]] = {
            Load: self._load,
            Store: self._store,
            Compute: self._compute,
            Fetch: self._fetch,
            Run: self._run,
            Loop: self._loop,
            Branch: self._branch,
        }

    def routine(self, routine: Routine, inputs: list[Any], updates: int = 0) -> list[Any]:
        """Run an activation; returns its slots. `inputs` is emptied."""
        slots: list[Any] = [None] * routine.size
        for slot, number in routine.start.items():
            slots[slot] = number
        for at, value in zip(routine.inputs, inputs, strict=True):
            slots[at] = value
        inputs.clear()
        do = self._do
        for step in routine.steps:
            do[type(step)](step, slots, updates)
            for slot in step.last:
                slots[slot] = None
        return slots

    # ---- transfers ------------------------------------------------------------------------------
    def _load(self, step: Load, slots: list[Any], updates: int) -> None:
        slots[step.out] = self._moving.load(step, slots[step.at])

    def _store(self, step: Store, slots: list[Any], updates: int) -> None:
        self._moving.store(step, slots[step.at], slots[step.value])

    def _compute(self, step: Compute, slots: list[Any], updates: int) -> None:
        results = step.rule(*(slots[s] for s in step.ins))
        for slot, number in zip(step.outs, results, strict=True):
            slots[slot] = number

    def _fetch(self, step: Fetch, slots: list[Any], updates: int) -> None:
        found = tuple(int(x.item()) for x in numbers(slots[step.value]))
        slots[step.out] = found[0] if len(set(found)) == 1 else found
        self._fetched.append(slots[step.out])

    # ---- segments -------------------------------------------------------------------------------
    def _run(self, step: Run, slots: list[Any], updates: int) -> None:
        self._moving.run(step)
        segment, shared = step.segment, self._shared
        arguments = [slots[s] for s in step.args]
        for i in segment.numbers:
            arguments[i] = self._number(arguments[i], segment.args[i].spec)
        arguments += [shared.streams[s] for s in segment.streams]
        arguments += [shared.positions[s] for s in segment.streams]
        arguments += [shared.constants[c._content] for c in segment.constants]
        if segment.is_checked:
            arguments.append(shared.fault)
        if segment.is_rounded:
            arguments += [shared.seed, self._number(updates + step.updates, COUNT)]
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

    # ---- routines -------------------------------------------------------------------------------
    def _loop(self, step: Loop, slots: list[Any], updates: int) -> None:
        body, routine = step.body, step.body.routine
        current = [slots[s] for s in body.args]
        for i in body.copies:
            current[i] = self._copy(current[i])
        for slot in body.donated:
            slots[slot] = None
        base, each = step.updates
        outs: list[Any] = []
        into = {i for _, i in step.carried}
        for iteration in range(step.count):
            given = list(current)
            if iteration == step.count - 1:
                current.clear()
            else:
                for i in routine.consumed:
                    if i in into:
                        current[i] = None
                    else:  # the next iteration is given the same
                        given[i] = self._copy(given[i])
            inner = self.routine(routine, given, updates + base + iteration * each)
            outs = [inner[s] for s in routine.outputs]
            inner.clear()
            if iteration < step.count - 1:
                for k, i in step.carried:
                    current[i] = outs[k]
                for i in step.copies:
                    current[i] = self._copy(current[i])
                outs.clear()
        for out, value in zip(body.outs, outs, strict=True):
            if out is not None:
                slots[out] = value

    def _branch(self, step: Branch, slots: list[Any], updates: int) -> None:
        condition = slots[step.condition]
        if isinstance(condition, tuple):
            raise popart_exception(
                "the condition of a conditional whose branches move entries of remote buffers "
                f"differs between replicas: {condition}; it must be the same on all of them"
            )
        taken = 0 if condition else 1
        passed: Passed = step.branches[taken]
        inner = self.routine(
            passed.routine, [slots[s] for s in passed.args], updates + step.updates
        )
        for slot, at in zip(step.outs, passed.routine.outputs, strict=True):
            if slot is not None:
                slots[slot] = inner[at]
