"""Upload of variables from host to devices, and download of their values."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import jax
import numpy as np

from popxl._devices import cpu
from popxl._devices.mesh import create_per_replica_sharding
from popxl._run.program import Program, ProgramState
from popxl._storage import replica_arrays
from popxl._storage.buffer_storage import BufferStorage
from popxl._storage.host_values import HostValues, SharedValue, Source
from popxl._storage.replica_arrays import IdentityTuple, VariableShard, variable_shards
from popxl.tensor import Shard, Variable

if TYPE_CHECKING:
    from popxl._storage.disk_queue import DiskQueue


THREADS = 4
"""Number of threads that compute lazy values."""


def upload_variables(
    program: Program, values: HostValues, disk_queue: DiskQueue | None
) -> ProgramState:
    """Copies the host's values of all variables to the devices and returns the program state.

    Args:
        disk_queue: see `open_disk_queue`; the state closes it.

    Raises:
        DiskError: the folder has no room for the entries on disk.
    """
    try:
        memory = program.platform.host_memory
        entries = {b: BufferStorage(b, program.mesh, memory, disk_queue) for b in program.buffers}
    except Exception:
        if disk_queue is not None:
            disk_queue.close()
        raise
    state = ProgramState({}, entries, disk_queue)
    try:
        for _ in put_variables(program, state, values.variables, values):
            pass
    except BaseException:  # what makes the values may fail
        state.close()
        raise
    cpu.return_free_memory()
    return state


def open_disk_queue(program: Program, disk: str | os.PathLike[str] | None) -> DiskQueue | None:
    """Returns the queue of disk reads and writes of a program; None if it keeps nothing on disk.

    Raises:
        DiskError: the folder cannot be used.
        ValueError: there are some, and no folder.
    """
    on_disk = [buffer for buffer in program.buffers if buffer.on_disk]
    if not on_disk:
        return None
    if disk is None:
        raise ValueError(
            f"{on_disk[0]!r} has entries on disk: give the session a folder for them, disk=FOLDER"
        )
    from popxl._storage.disk_queue import DiskQueue

    return DiskQueue.open_shared(disk, jax.process_index())


def put_variables(
    program: Program, state: ProgramState, variables: Iterable[Variable], values: HostValues
) -> Iterator[Variable]:
    """Copies variables' values from host to devices; yields each variable when it is copied."""
    make = partial(_local_value, program, values)
    for var, value in _compute_values_ahead(variables, values.concurrent, make):
        _put_variable(program, state, var, value, values)
        yield var


def _compute_values_ahead(
    variables: Iterable[Variable],
    concurrent: Set[Variable],
    compute_value: Callable[[Variable], np.ndarray],
) -> Iterator[tuple[Variable, Callable[[], np.ndarray]]]:
    """Computes variables' values ahead in threads; yields each variable and its value function.

    Threads compute values ahead of their use, within the memory of the largest of them.

    Args:
        concurrent: variables whose values threads can compute.
        compute_value: makes a value.
    """
    variables = list(variables)
    lazy_variables = [var for var in variables if var in concurrent]
    free_bytes = max(map(_variable_bytes, lazy_variables), default=0)
    not_started = deque(lazy_variables)
    started: deque[tuple[Variable, Future[np.ndarray]]] = deque()
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        try:
            for var in variables:
                while not_started and (
                    not started or free_bytes >= _variable_bytes(not_started[0])
                ):
                    free_bytes -= _variable_bytes(not_started[0])
                    var_to_start = not_started.popleft()
                    started.append((var_to_start, pool.submit(compute_value, var_to_start)))
                if started and started[0][0] is var:
                    yield var, partial(_take_result, [started.popleft()[1]])
                    free_bytes += _variable_bytes(var)
                else:
                    yield var, partial(compute_value, var)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _take_result(futures: list[Future[np.ndarray]]) -> np.ndarray:
    """Returns a thread's computed value of a variable, and drops the thread's reference to it."""
    return futures.pop().result()


def _variable_bytes(var: Variable) -> int:
    return math.prod(var.shape_on_host) * var.dtype.itemsize


def _put_variable(
    program: Program, state: ProgramState, var: Variable, value: Source, values: HostValues
) -> None:
    """Replaces a variable's value on the devices by the result of `value()`."""
    if var._remote is None:
        resident, sharding = device_tensor(var), create_per_replica_sharding(program.mesh)
        state.variables[resident] = replica_arrays.put_variable(
            var, value(), resident.shape, sharding
        )
    elif var._remote[0] in state.entries:
        buffer, index = var._remote
        if not _share_entry(state.entries[buffer], index, values.shared_value(var)):
            state.entries[buffer].put_value(index, var, value())


def _local_value(program: Program, values: HostValues, var: Variable) -> np.ndarray:
    """Returns a variable's host value; with several processes, only local shards are filled."""
    source = values.lazy_value(var)
    if source is None or jax.process_count() == 1:
        return values.value(var)
    return source.make_shards(_local_shards(shards_of_variable(program, var), jax.process_index()))


def _share_entry(entries: BufferStorage, index: int, shared_value: SharedValue | None) -> bool:
    """Shares another session's remote-buffer entry; False if it has no such entry."""
    if shared_value is None:
        return False
    state, remote = shared_value.state(), shared_value.variable._remote
    if state is None or remote is None or remote[0] not in state.entries:
        return False
    return entries.share_entry(index, state.entries[remote[0]], remote[1])


def changeable_variables(program: Program) -> set[Variable]:
    """Returns the variables that a run can change."""
    changed = {_owning_variable(t) for t in program.changed_variables}
    return changed.union(*(b._variables.values() for b in program.effects.writes))


def take_changed_variables(program: Program, state: ProgramState) -> set[Variable]:
    """Returns the variables changed by runs since the last call, and resets this record."""
    changed = {_owning_variable(t) for t in program.changed_variables}
    for buffer, entries in state.entries.items():
        changed.update(v for i, v in buffer._variables.items() if i in entries.stored)
        entries.stored.clear()
    return changed


def fetch_variable(program: Program, state: ProgramState, var: Variable) -> np.ndarray:
    """Returns a variable's value from the devices; collective over processes.

    It can be a view of device memory.
    """
    from popxl._run.process_gather import gather_shards

    parts = replica_arrays.replica_shards(*_stored_array(program, state, var))
    same_shard = _local_replicas(program, var)
    if same_shard is not None:
        own = {r: parts[next(o for o in same_shard[r] if o in parts)] for r in same_shard}
        return replica_arrays.assemble_host_value(var, own.__getitem__).view(var.dtype.as_numpy())
    everyones = gather_shards(parts, replica_arrays.replicas_to_assemble(var), program.mesh)
    value = replica_arrays.assemble_host_value(var, everyones.__getitem__)
    return value.view(var.dtype.as_numpy())


def _local_replicas(program: Program, var: Variable) -> dict[int, tuple[int, ...]] | None:
    """Returns, for each replica, the replicas with the same shard, if every process has all shards.

    Every process must hold every shard. None if processes must exchange shards, or there is one
    process.
    """
    if var._retrieval == "all_replicas":
        return None
    parts = shards_of_variable(program, var)
    processes = {d.process_index for d in program.mesh.devices.flat}
    same_shard = {replica: part.replicas for part in parts for replica in part.replicas}
    if len(processes) == 1 or any(len(part.processes) < len(processes) for part in parts):
        return None
    return (
        same_shard
        if all(r in same_shard for r in replica_arrays.replicas_to_assemble(var))
        else None
    )


def shards_of_variable(program: Program, var: Variable) -> IdentityTuple[VariableShard]:
    """Returns the shards of a variable; equally sharded variables get the same object."""
    return variable_shards(var, tuple(d.process_index for d in program.mesh.devices.flat))


@lru_cache(2**12)
def _local_shards(
    parts: IdentityTuple[VariableShard], process: int
) -> IdentityTuple[VariableShard]:
    return IdentityTuple(part for part in parts if process in part.processes)


def local_shard(
    program: Program, state: ProgramState, var: Variable, replicas: Sequence[int]
) -> np.ndarray:
    """Returns a variable's shard from the one of `replicas` that belongs to this process."""
    devices, process = program.mesh.devices.flat, jax.process_index()
    replica = next(r for r in replicas if devices[r].process_index == process)
    return replica_arrays.replica_shards(*_stored_array(program, state, var), replica)[replica]


def _stored_array(
    program: Program, state: ProgramState, var: Variable
) -> tuple[jax.Array, int, tuple[int, ...]]:
    """Returns a variable's device array, the number of replicas, and the shape on one replica."""
    replicas = program.mesh.devices.size
    if var._remote is None:
        resident = device_tensor(var)
        return state.variables[resident], replicas, resident.shape
    buffer, index = var._remote
    return state.entries[buffer].array(index), replicas, buffer.tensor_shape


def _owning_variable(t: Variable | Shard) -> Variable:
    """Returns the variable of a device tensor, which is the variable itself or its shard."""
    return t._of if isinstance(t, Shard) else t


def device_tensor(var: Variable) -> Variable | Shard:
    """Returns the device tensor of a variable outside remote buffers: itself or its shard."""
    return var if var._shard is None else var._shard
