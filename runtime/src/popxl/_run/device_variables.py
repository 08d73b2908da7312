"""Values of variables on the devices of a program: put there, found there, and read back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial

import jax
import numpy as np

from popxl._devices import cpu
from popxl._devices.mesh import per_replica
from popxl._run.process_gather import parts_everywhere
from popxl._run.program import Program, State
from popxl._storage import replica_arrays
from popxl._storage.buffer_storage import Entries
from popxl._storage.disk_queue import Traffic
from popxl._storage.host_values import Borrowed, HostValues, Source
from popxl._storage.lazy_values import made_ahead
from popxl._storage.replica_arrays import Shared, VariableShard, variable_shards
from popxl.tensor import Shard, Variable


def upload(program: Program, values: HostValues, traffic: Traffic | None) -> State:
    """The host's values of all variables, on the devices.

    Args:
        traffic: see `disk_traffic`; the state closes it.

    Raises:
        DiskError: the folder has no room for the entries on disk.
    """
    try:
        memory = program.platform.host_memory
        entries = {b: Entries(b, program.mesh, memory, traffic) for b in program.buffers}
    except Exception:
        if traffic is not None:
            traffic.close()
        raise
    state = State({}, entries, traffic)
    try:
        for _ in put_each(program, state, values.variables, values):
            pass
    except BaseException:  # what makes the values may fail
        state.close()
        raise
    cpu.return_free_memory()
    return state


def disk_traffic(program: Program, disk: str | os.PathLike[str] | None) -> Traffic | None:
    """That of the folder for entries on disk; None if there are none.

    Raises:
        DiskError: it cannot be used.
        ValueError: there are some, and no folder.
    """
    wanted = [buffer for buffer in program.buffers if buffer.on_disk]
    if not wanted:
        return None
    if disk is None:
        raise ValueError(
            f"{wanted[0]!r} has entries on disk: give the session a folder for them, disk=FOLDER"
        )
    return Traffic.opened(disk, jax.process_index())


def put_each(
    program: Program, state: State, variables: Iterable[Variable], values: HostValues
) -> Iterator[Variable]:
    """Replace variables' values on the devices by the host's, one after the other."""
    make = partial(_value_here, program, values)
    for var, value in made_ahead(variables, values.concurrent, make):
        _put(program, state, var, value, values)
        yield var


def _put(program: Program, state: State, var: Variable, value: Source, values: HostValues) -> None:
    """Replace a variable's value on the devices by the host's, which `value` gives."""
    if var._remote is None:
        resident, sharding = _resident(var), per_replica(program.mesh)
        state.variables[resident] = replica_arrays.put_variable(
            var, value(), resident.shape, sharding
        )
    elif var._remote[0] in state.entries:
        buffer, index = var._remote
        if not _borrowed(state.entries[buffer], index, values.lender(var)):
            state.entries[buffer].put(index, var, value())


def _value_here(program: Program, values: HostValues, var: Variable) -> np.ndarray:
    """The host's value, as far as devices of this process hold it."""
    source = values.on_demand(var)
    if source is None or jax.process_count() == 1:
        return values.value(var)
    return source.some(_own_parts(parts_of(program, var), jax.process_index()))


def _borrowed(entries: Entries, index: int, lender: Borrowed | None) -> bool:
    """Whether an entry is that of a program that lends it its value."""
    if lender is None:
        return False
    state, theirs = lender.state(), lender.variable._remote
    if state is None or theirs is None or theirs[0] not in state.entries:
        return False
    return entries.borrow(index, state.entries[theirs[0]], theirs[1])


def may_change(program: Program) -> set[Variable]:
    """The variables that a run may change."""
    changed = {_variable(t) for t in program.changed}
    return changed.union(*(b._variables.values() for b in program.effects.writes))


def changes(program: Program, state: State) -> set[Variable]:
    """What runs have changed since this was asked last."""
    changed = {_variable(t) for t in program.changed}
    for buffer, entries in state.entries.items():
        changed.update(v for i, v in buffer._variables.items() if i in entries.stored)
        entries.stored.clear()
    return changed


def fetched(program: Program, state: State, var: Variable) -> np.ndarray:
    """The value on the devices, which all processes ask for together; it may be a view of their
    memory."""
    parts = replica_arrays.replica_parts(*_held(program, state, var))
    alike = _held_by_all(program, var)
    if alike is not None:
        own = {r: parts[next(o for o in alike[r] if o in parts)] for r in alike}
        return replica_arrays.host_value(var, own.__getitem__).view(var.dtype.as_numpy())
    everyones = parts_everywhere(parts, replica_arrays.replicas_needed(var), program.mesh)
    value = replica_arrays.host_value(var, everyones.__getitem__)
    return value.view(var.dtype.as_numpy())


def _held_by_all(program: Program, var: Variable) -> dict[int, tuple[int, ...]] | None:
    """By replica, those that hold what it does, if each of several processes has one of them; else
    None: then they must ask each other, or none need be asked."""
    if var._retrieval == "all_replicas":
        return None
    parts = parts_of(program, var)
    processes = {d.process_index for d in program.mesh.devices.flat}
    alike = {replica: part.replicas for part in parts for replica in part.replicas}
    if len(processes) == 1 or any(len(part.processes) < len(processes) for part in parts):
        return None
    return alike if all(r in alike for r in replica_arrays.replicas_needed(var)) else None


def parts_of(program: Program, var: Variable) -> Shared[VariableShard]:
    """The parts that make up a variable's value; the same object for variables cut alike."""
    return variable_shards(var, tuple(d.process_index for d in program.mesh.devices.flat))


@lru_cache(2**12)
def _own_parts(parts: Shared[VariableShard], process: int) -> Shared[VariableShard]:
    return Shared(part for part in parts if process in part.processes)


def part_here(program: Program, state: State, var: Variable, holders: Sequence[int]) -> np.ndarray:
    """What one of the `holders` has of a variable; one of them is of this process."""
    devices, here = program.mesh.devices.flat, jax.process_index()
    own = next(r for r in holders if devices[r].process_index == here)
    return replica_arrays.replica_parts(*_held(program, state, var), own)[own]


def _held(program: Program, state: State, var: Variable) -> tuple[jax.Array, int, tuple[int, ...]]:
    """The array of a variable, the number of replicas, and the shape of what each holds."""
    replicas = program.mesh.devices.size
    if var._remote is None:
        resident = _resident(var)
        return state.variables[resident], replicas, resident.shape
    buffer, index = var._remote
    return state.entries[buffer].array(index), replicas, buffer.tensor_shape


def _variable(t: Variable | Shard) -> Variable:
    """The variable that a tensor on the devices holds the value of."""
    return t._of if isinstance(t, Shard) else t


def _resident(var: Variable) -> Variable | Shard:
    """What the devices hold of a variable that is in no remote buffer."""
    return var if var._shard is None else var._shard
