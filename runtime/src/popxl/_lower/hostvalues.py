"""Values of variables on the host: what the user writes and reads.

A variable has a host array, which is live: the user may hold it. A value that was written as a
function is not put there until somebody asks for the array (`Variable._source`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from popxl._lower.hostdata import host_value, stored_entry
from popxl.tensor import Constant, Variable
from popxl.utils import to_numpy

if TYPE_CHECKING:
    from popxl._lower.program import State
    from popxl.ir import Ir


@dataclass(frozen=True)
class Lent:
    """The value of another session's variable, for `Session.write_variables_data`.

    Where both are entries of remote buffers that are alike, the value is not copied: the entry
    belongs to both, until the program that borrows it stores to it.

    Attributes:
        state: gives that session's state, or None.
        read: gives the value.
    """

    variable: Variable
    state: Callable[[], State | None]
    read: Callable[[], np.ndarray]

    def __call__(self) -> np.ndarray:
        return self.read()


def checked(ir: Ir, var: Variable, data: Any) -> np.ndarray | Callable[[], np.ndarray]:
    """Data to write, in the variable's type; of a function, one that makes such data."""
    if not isinstance(var, Variable):
        raise TypeError(f"only variables can be written, not {var!r}")
    if var.ir is not ir:
        raise ValueError(f"{var!r} belongs to another Ir than this session")
    if var._retrieval == "all_replicas" and var._grouping.group_size > 1:
        raise NotImplementedError(
            f"{var!r}: writing variables of retrieval mode 'all_replicas' with groups of several "
            "replicas is not supported"
        )
    if not var._data.flags.writeable:
        raise ValueError(
            f"variable {var.id!r} is stored in a read-only memory map: open it with mode 'r+' or "
            "'c' to write it"
        )
    if isinstance(data, Lent) and not isinstance(var._data, np.memmap):
        return replace(data, read=lambda: _fitting(var, data.read()))
    if callable(data) and not isinstance(var._data, np.memmap):
        return lambda: _fitting(var, data())
    return _fitting(var, data() if callable(data) else data)


def _fitting(var: Variable, data: Any) -> np.ndarray:
    array = to_numpy(data, var.dtype, copy=False)
    if array.shape != var.shape_on_host:
        raise ValueError(
            f"variable {var.id!r} needs data of shape {var.shape_on_host}, but got {array.shape}"
        )
    return array


def check_host_data(ir: Ir, t: Any, *kinds: type[Variable | Constant]) -> None:
    """Raise unless `t` is of one of `kinds`, and of `ir`."""
    if not isinstance(t, kinds):
        names = " and ".join(f"{kind.__name__.lower()}s" for kind in kinds)
        raise TypeError(f"only {names} have host data, not {t!r}")
    if t.ir is not ir:
        raise ValueError(f"{t!r} belongs to another Ir than this session")


def place(var: Variable) -> tuple[int, int]:
    """A key that brings variables of one remote buffer together, in the order of its entries."""
    return (var._remote[0].remote_buffer_id, var._remote[1]) if var._remote else (-1, 0)


def host_data(t: Variable | Constant) -> np.ndarray:
    """The live host array, filled with the value that was written or read last."""
    if isinstance(t, Variable):
        if t._source is not None:
            fill_host(t, t._source())
        if t._retrieval == "all_replicas":
            if t._retrieved is None:
                values = host_value(t, lambda r: initial_on_replica(t, r))
                t._retrieved = np.array(values)
            return t._retrieved
    return t._data


def fill_host(var: Variable, value: np.ndarray) -> None:
    """Copy a value into the variable's host array."""
    np.copyto(var._data, value)
    var._source = None
    if isinstance(var._data, np.memmap):
        var._data.flush()


def initial_on_replica(var: Variable, replica: int) -> np.ndarray:
    """What a replica stores of the value on the host."""
    return stored_entry(var, var._value(), replica)


def store_host(var: Variable, value: np.ndarray) -> None:
    """Copy a value read from the devices into the variable's host array."""
    if var._retrieval == "all_replicas":
        if var._retrieved is None:
            var._retrieved = np.array(value)
        else:
            np.copyto(var._retrieved, value)
        first = [members[0] for members in var._grouping.groups]
        value = value[first] if var._grouping.num_groups > 1 else value[first[0]]
    if not var._data.flags.writeable:
        var._data = np.array(var._data)
    fill_host(var, value)
