"""Host values of a session's variables, which the user reads and writes.

A session starts with the data of the program's variables. What is written to it or downloaded from
its devices belongs to it alone: two sessions of one program do not see each other's values. Arrays
are shared until one of the sessions changes its array or returns it to the user, who can hold it.
A session that is created later starts with the values that any session downloaded last.

Each session can run in a thread of its own. Only the owner of an array writes to it, under the Ir's
lock. Shared arrays without an owner are never written; another session's array is copied under the
lock when it is read. A memory map is shared by all sessions, which use it one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from popxl._storage.replica_arrays import assemble_host_value, replica_value
from popxl.errors import popart_exception
from popxl.tensor import Constant, Variable
from popxl.utils import to_numpy

if TYPE_CHECKING:
    from popxl._storage.replica_arrays import VariableShard
    from popxl.ir import Ir

Source = Callable[[], np.ndarray]


@dataclass(frozen=True)
class SharedValue:
    """A variable's value in another session, for `Session.write_variables_data`.

    If both variables are entries of equal remote buffers, the entry is shared without a copy,
    until the second program stores to it.

    Attributes:
        state: returns that session's `ProgramState`, or None.
        read: returns the value.
    """

    variable: Variable
    state: Callable[[], Any]
    read: Callable[[], np.ndarray]

    def __call__(self) -> np.ndarray:
        return self.read()


@dataclass(frozen=True)
class LazyValue:
    """A variable's value computed on demand, in full or by shards.

    For `Session.write_variables_data`.

    Attributes:
        make_full: makes it.
        make_shards: makes it for a process that holds only these parts; the other elements do not
            matter.
    """

    make_full: Callable[[], np.ndarray]
    make_shards: Callable[[tuple[VariableShard, ...]], np.ndarray]

    def __call__(self) -> np.ndarray:
        return self.make_full()


class HostValues:
    """Host values of a session's variables, with marks of those that are stale or lost.

    Attributes:
        stale: variables that the devices hold a newer value of.
        lost: variables whose newest value nobody holds any more.
        concurrent: variables whose values functions make, which may be called by any thread.
    """

    def __init__(self, ir: Ir) -> None:
        self.ir = ir
        self.stale: set[Variable] = set()
        self.lost: set[Variable] = set()
        self._owned: set[Variable] = set()  # whose array is this session's
        self._sources: dict[Variable, Source] = {}  # what makes a value that is in no array yet
        self.concurrent: set[Variable] = set()
        self._replica_arrays: dict[Variable, np.ndarray] = {}
        with ir._host_lock:
            self._arrays = {v: v._data for v in ir.main_graph.variables}
            ir._host_values.add(self)

    @property
    def variables(self) -> list[Variable]:
        """Variables that existed when the session was created."""
        return list(self._arrays)

    @property
    def read_only(self) -> Variable | None:
        """A variable whose host array is a read-only memory map, so that none is written back."""
        maps = (v for v, array in self._arrays.items() if isinstance(array, np.memmap))
        return next((v for v in maps if not self._arrays[v].flags.writeable), None)

    # ---- checks ---------------------------------------------------------------------------------
    def check_tensor(self, t: Any, *kinds: type[Variable | Constant]) -> None:
        """Raises unless `t` is a tensor of a class in `kinds` that belongs to the session."""
        if not isinstance(t, kinds):
            names = " and ".join(f"{kind.__name__.lower()}s" for kind in kinds)
            raise TypeError(f"only {names} have host data, not {t!r}")
        self._check_owner(t)

    def _check_owner(self, t: Variable | Constant) -> None:
        if t.ir is not self.ir:
            raise ValueError(f"{t!r} belongs to another Ir than this session")
        if isinstance(t, Variable) and t not in self._arrays:
            raise ValueError(
                f"variable {t.id!r} was created after this session: make a new session of the Ir"
            )

    def check_not_lost(self, var: Variable) -> None:
        """Raises if a variable's value is lost, as after a failed run."""
        if var in self.lost:
            raise popart_exception(
                f"the value of variable {var.id!r} is lost: a run stopped in the middle, or its "
                "result did not reach the host. Write the variable, or load a checkpoint"
            )

    def check_complete(self, message: str) -> None:
        """Raises `message` if the value of any variable is lost."""
        if self.lost:
            names = sorted(repr(v.id) for v in self.lost)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise popart_exception(
                f"{message}: a run stopped in the middle, and what it changes is lost. Write the "
                f"variables {', '.join(names[:3])}{more} first, or load a checkpoint"
            )

    def convert(self, var: Variable, data: Any) -> np.ndarray | Source:
        """Returns data in the variable's dtype; a function is wrapped to return such data."""
        if not isinstance(var, Variable):
            raise TypeError(f"only variables can be written, not {var!r}")
        self._check_owner(var)
        if var._retrieval == "all_replicas" and var._grouping.group_size > 1:
            raise NotImplementedError(
                f"{var!r}: writing variables of retrieval mode 'all_replicas' with groups of "
                "several replicas is not supported"
            )
        is_map = isinstance(self._arrays[var], np.memmap)
        if is_map and not self._arrays[var].flags.writeable:
            raise ValueError(
                f"variable {var.id!r} is stored in a read-only memory map: open it with mode 'r+' "
                "or 'c' to write it"
            )
        if isinstance(data, SharedValue) and not is_map:
            return replace(data, read=lambda: _convert(var, data.read()))
        if isinstance(data, LazyValue) and not is_map:
            make_full, make_shards = data.make_full, data.make_shards
            return LazyValue(
                lambda: _convert(var, make_full()), lambda parts: _convert(var, make_shards(parts))
            )
        if callable(data) and not is_map:
            return lambda: _convert(var, data())
        return _convert(var, data() if callable(data) else data)

    # ---- reading --------------------------------------------------------------------------------
    def value(self, var: Variable) -> np.ndarray:
        """Returns a variable's host value; a lazy value is computed again and not kept."""
        if var in self._sources:
            return self._sources[var]()
        with self.ir._host_lock:
            array = self._arrays[var]
            owned = any(var in other._owned for other in self._sharers_of(var, array))
            return np.array(array) if owned else array

    def lazy_value(self, var: Variable) -> LazyValue | None:
        """Returns the `LazyValue` written to a variable; None if there is none."""
        source = self._sources.get(var)
        return source if isinstance(source, LazyValue) else None

    def shared_value(self, var: Variable) -> SharedValue | None:
        """Returns the `SharedValue` written to a variable; None if there is none."""
        source = self._sources.get(var)
        return source if isinstance(source, SharedValue) else None

    def value_on_replica(self, var: Variable, replica: int) -> np.ndarray:
        """Returns the group's value, or the shard, of a variable that one replica stores."""
        return replica_value(var, self.value(var), replica)

    def current_host_array(self, t: Variable | Constant) -> np.ndarray:
        """Returns the session's host array of a variable or constant, with the latest value."""
        if isinstance(t, Constant):
            return t._data
        if t in self._sources:
            self.copy_to_host_array(t, self._sources[t]())
        if t._retrieval == "all_replicas":
            if t not in self._replica_arrays:
                values = assemble_host_value(t, lambda replica: self.value_on_replica(t, replica))
                self._replica_arrays[t] = np.array(values)
            return self._replica_arrays[t]
        with self.ir._host_lock:
            if self._arrays[t].flags.writeable:
                self._copy_if_shared(t)
            return self._arrays[t]

    # ---- writing --------------------------------------------------------------------------------
    def write(self, var: Variable, data: np.ndarray | Source, concurrent: bool = False) -> None:
        """Sets a variable's host value to `data`.

        Args:
            concurrent: whether threads can call the function `data`.
        """
        self._replica_arrays.pop(var, None)
        self.concurrent.discard(var)
        if callable(data):
            self._sources[var] = data
            if concurrent and not isinstance(data, SharedValue):
                self.concurrent.add(var)
        else:
            self.copy_to_host_array(var, data)
        self.stale.discard(var)
        self.lost.discard(var)

    def set_from_device(self, var: Variable, value: np.ndarray) -> None:
        """Sets a variable's host value to `value`, read from the devices."""
        if var._retrieval == "all_replicas":
            np.copyto(self._replica_arrays.setdefault(var, np.array(value)), value)
            first = [members[0] for members in var._grouping.groups]
            value = value[first] if var._grouping.num_groups > 1 else value[first[0]]
        self.copy_to_host_array(var, value)
        self.stale.discard(var)

    def copy_to_host_array(self, var: Variable, value: np.ndarray) -> None:
        """Copies a variable's value into its host array, from which new sessions start."""
        with self.ir._host_lock:
            self._copy_if_shared(var)
            array = self._arrays[var]
            if not isinstance(array, np.memmap):
                self._copy_for_sharers(var, array)
            np.copyto(array, value)
            var._data = array
        if isinstance(array, np.memmap):
            array.flush()
        self._sources.pop(var, None)
        self.concurrent.discard(var)

    def flush(self) -> None:
        """Writes the memory maps among the variables' host arrays to their files."""
        for array in self._arrays.values():
            if isinstance(array, np.memmap):
                array.flush()

    def _copy_if_shared(self, var: Variable) -> None:
        """Makes a variable's host array private to this session; a memory map stays shared."""
        array = self._arrays[var]
        if var in self._owned or isinstance(array, np.memmap):
            return
        if self._sharers_of(var, array) or not array.flags.writeable:
            self._arrays[var] = np.array(array)
        self._owned.add(var)

    def _copy_for_sharers(self, var: Variable, array: np.ndarray) -> None:
        """Gives the sessions that share a host array a copy of it, before it changes."""
        sharing = self._sharers_of(var, array)
        if sharing:
            old_values = np.array(array)
            for other in sharing:
                other._arrays[var] = old_values

    def _sharers_of(self, var: Variable, array: np.ndarray) -> list[HostValues]:
        return [o for o in self.ir._host_values if o is not self and o._arrays.get(var) is array]

    # ---- runs -----------------------------------------------------------------------------------
    def begin_run(self, may_change: Iterable[Variable]) -> None:
        """Marks the host values of variables that a run can change as lost until the run ends."""
        self.lost.update(may_change)

    def end_run(self, changed: Iterable[Variable]) -> None:
        """Marks the host values of variables that the run has changed as stale."""
        self.stale.update(changed)
        self.lost.clear()

    def detach(self, downloads: bool) -> None:
        """Updates the host values' stale and lost marks when the session leaves the devices.

        Args:
            downloads: the session brings the newest values to the host before; what is still
                stale did not get there.
        """
        if downloads:
            self.lost |= self.stale
        else:
            self.lost.clear()
        self.stale.clear()


def _convert(var: Variable, data: Any) -> np.ndarray:
    try:
        array = to_numpy(data, var.dtype, copy=False)
    except ValueError as error:
        raise ValueError(f"variable {var.id!r}: {error}") from error
    if array.shape != var.shape_on_host:
        raise ValueError(
            f"variable {var.id!r} needs data of shape {var.shape_on_host}, but got {array.shape}"
        )
    return array


def storage_sort_key(var: Variable) -> tuple[int, int]:
    """Returns a sort key that groups the variables of a remote buffer, in entry order."""
    return (var._remote[0].remote_buffer_id, var._remote[1]) if var._remote else (-1, 0)
