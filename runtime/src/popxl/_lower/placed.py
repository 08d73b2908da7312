"""Values of variables on the devices of a program: put there, found there, and read back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import jax
import numpy as np

from popxl._lower import hostdata
from popxl._lower.devices import per_replica
from popxl._lower.entries import Entries
from popxl._lower.exchange import parts_everywhere
from popxl._lower.program import Program, State
from popxl.tensor import Shard, Variable


class VariablePart(NamedTuple):
    """Consecutive elements of a variable's value, as some replicas hold them.

    Attributes:
        group: of the variable's replica grouping.
        start, size: which elements of that group's value, in C order.
        processes: those whose replicas hold it.
        replicas: that hold it.
    """

    group: int
    start: int
    size: int
    processes: tuple[int, ...]
    replicas: tuple[int, ...]


def upload(program: Program) -> State:
    """The host's values of all variables, on the devices."""
    state = State(
        {t: _resident_value(program, t) for t in program.variables},
        {b: Entries(b, program.mesh) for b in program.buffers},
    )
    for buffer in program.buffers:
        for var in buffer._variables.values():
            put(program, state, var)
    return state


def put(program: Program, state: State, var: Variable) -> None:
    """Replace a variable's value on the devices by the host's."""
    if var._remote is None:
        resident = _resident(var)
        state.variables[resident] = _resident_value(program, resident)
    elif var._remote[0] in state.entries:
        buffer, index = var._remote
        state.entries[buffer].put(index, var)


def note_changes(program: Program, state: State) -> None:
    """After a run: the host's values of what it has changed are stale."""
    for t in program.changed:
        _variable(t)._stale = True
    for buffer, entries in state.entries.items():
        for index in entries.stored:
            if index in buffer._variables:
                buffer._variables[index]._stale = True
        entries.stored.clear()


def fetched(program: Program, state: State, var: Variable) -> np.ndarray:
    """The value on the devices, which all processes ask for together; it may be a view of their
    memory."""
    parts = hostdata.replica_parts(*_held(program, state, var))
    alike = _held_by_all(program, var)
    if alike is not None:
        own = {r: parts[next(o for o in alike[r] if o in parts)] for r in alike}
        return hostdata.host_value(var, own.__getitem__).view(var.dtype.as_numpy())
    everyones = parts_everywhere(parts, hostdata.replicas_needed(var), program.mesh)
    value = hostdata.host_value(var, everyones.__getitem__)
    return value.view(var.dtype.as_numpy())


def _held_by_all(program: Program, var: Variable) -> dict[int, tuple[int, ...]] | None:
    """By replica, those that hold what it does, if each process has one of them; else None."""
    if var._retrieval == "all_replicas":
        return None
    parts = parts_of(program, var)
    processes = {d.process_index for d in program.mesh.devices.flat}
    if any(len(part.processes) < len(processes) for part in parts):
        return None
    return {replica: part.replicas for part in parts for replica in part.replicas}


def parts_of(program: Program, var: Variable) -> hostdata.Shared[VariablePart]:
    """The parts that make up a variable's value; the same object for variables cut alike."""
    return _parts(hostdata.parts_of(var), tuple(d.process_index for d in program.mesh.devices.flat))


@cache
def _parts(
    parts: hostdata.Shared[tuple[int, int, int, tuple[int, ...]]], owners: tuple[int, ...]
) -> hostdata.Shared[VariablePart]:
    return hostdata.Shared(
        VariablePart(group, start, size, tuple(sorted({owners[r] for r in holders})), holders)
        for group, start, size, holders in parts
    )


def part_here(program: Program, state: State, var: Variable, holders: Sequence[int]) -> np.ndarray:
    """What one of the `holders` has of a variable; one of them is of this process."""
    devices, here = program.mesh.devices.flat, jax.process_index()
    own = next(r for r in holders if devices[r].process_index == here)
    return hostdata.replica_parts(*_held(program, state, var), own)[own]


def _held(program: Program, state: State, var: Variable) -> tuple[jax.Array, int, tuple[int, ...]]:
    """The array of a variable, the number of replicas, and the shape of what each holds."""
    replicas = program.mesh.devices.size
    if var._remote is None:
        resident = _resident(var)
        return state.variables[resident], replicas, resident.shape
    buffer, index = var._remote
    return state.entries[buffer].array(index), replicas, buffer.tensor_shape


def _resident_value(program: Program, t: Variable | Shard) -> jax.Array:
    return hostdata.put_variable(_variable(t), t.shape, per_replica(program.mesh))


def _variable(t: Variable | Shard) -> Variable:
    """The variable that a tensor on the devices holds the value of."""
    return t._of if isinstance(t, Shard) else t


def _resident(var: Variable) -> Variable | Shard:
    """What the devices hold of a variable that is in no remote buffer."""
    return var if var._shard is None else var._shard
