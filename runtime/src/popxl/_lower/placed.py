"""Values of variables on the devices of a program: put there, found there, and read back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from popxl._lower import hostdata
from popxl._lower.devices import per_replica
from popxl._lower.entries import Entries
from popxl._lower.exchange import parts_everywhere
from popxl._lower.program import Program, State
from popxl.tensor import Shard, Variable

ValueOf = Callable[[Variable], np.ndarray]


def upload(program: Program, variables: Iterable[Variable], value: ValueOf) -> State:
    """The host's values of variables, on the devices."""
    state = State({}, {b: Entries(b, program.mesh) for b in program.buffers})
    for var in variables:
        put(program, state, var, value)
    return state


def put(program: Program, state: State, var: Variable, value: ValueOf) -> None:
    """Replace a variable's value on the devices by the host's."""
    if var._remote is None:
        resident, sharding = _resident(var), per_replica(program.mesh)
        array = hostdata.put_variable(var, value(var), resident.shape, sharding)
        state.variables[resident] = array
    elif var._remote[0] in state.entries:
        buffer, index = var._remote
        state.entries[buffer].put(index, var, value(var))


def may_change(program: Program) -> set[Variable]:
    """The variables that a run may change."""
    found = {_variable(t) for t in program.changed}
    return found.union(*(b._variables.values() for b in program.effects.writes))


def changes(program: Program, state: State) -> set[Variable]:
    """What runs have changed since this was asked last."""
    found = {_variable(t) for t in program.changed}
    for buffer, entries in state.entries.items():
        found.update(v for i, v in buffer._variables.items() if i in entries.stored)
        entries.stored.clear()
    return found


def fetched(program: Program, state: State, var: Variable) -> np.ndarray:
    """The value on the devices, which all processes ask for together; it may be a view of their
    memory."""
    parts = hostdata.replica_parts(*_held(program, state, var))
    everyones = parts_everywhere(parts, hostdata.replicas_needed(var), program.mesh)
    value = hostdata.host_value(var, everyones.__getitem__)
    return value.view(var.dtype.as_numpy())


def processes_of(program: Program, holders: Sequence[int]) -> tuple[int, ...]:
    """The processes that replicas belong to."""
    devices = list(program.mesh.devices.flat)
    return tuple(sorted({devices[r].process_index for r in holders}))


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


def _variable(t: Variable | Shard) -> Variable:
    """The variable that a tensor on the devices holds the value of."""
    return t._of if isinstance(t, Shard) else t


def _resident(var: Variable) -> Variable | Shard:
    """What the devices hold of a variable that is in no remote buffer."""
    return var if var._shard is None else var._shard
