"""Variable factories: they create the variables that a graph takes as inputs.

A module's graph has inputs for its variables. For each there is a `VariableFactory` that knows how
to make the data, so that the same graph can be called with many sets of variables, on the device
or in remote buffers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import popxl
from popxl import ReplicaGrouping, dtypes, ops
from popxl._ir.sharding import MetaShape
from popxl.tensor import HostScalarTensor, HostTensor, host_tensor_types
from popxl.utils import to_numpy
from popxl_addons.dot_tree import DotTree
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.named_tensors import NamedTensors

if TYPE_CHECKING:
    from popxl_addons.remote import NamedRemoteBuffers

Kind = Literal["parameter", "fp8"]
DataIter = Callable[[], HostScalarTensor] | Iterable[HostTensor] | HostScalarTensor

host_scalar_tensor_types = (float, int, bool, np.number, np.bool_, *host_tensor_types)


def _iterate_data(data_iter: Any) -> Iterator[Any]:
    """Iterate over data for successive variables; ValueError unless `data_iter` gives data."""
    if callable(data_iter):
        return (data_iter() for _ in itertools.repeat(None))
    if isinstance(data_iter, (np.ndarray, np.generic, float, int)) or hasattr(data_iter, "numpy"):
        return itertools.repeat(data_iter)
    try:
        return iter(data_iter)
    except TypeError:
        raise ValueError(
            f"the data of a variable must come from a callable, an iterable or an array, not from "
            f"{data_iter!r}"
        ) from None


class VariableFactory:
    """Creates variables of one shape and dtype; an iterator gives the data of each.

    Args:
        data_iter: where the data come from: a callable called for each item, an iterable of
            items, or one array for all. An item is the value of the variable on a replica; a
            variable takes one for each of its replica groups, group by group. The first item is
            looked at for its shape; it is also the first to be used.
        dtype: element type; default: that of the data, downcast from 64 to 32 bits.
        name: default name of the variables.
        by_ref: whether graph inputs made by `create_input` are by-reference.
        replica_grouping: replicas that share a value; default: all.
        shard_over: number of replicas the variable is sharded over, when it is an input or lives
            in a remote buffer: parts of floor(n / shard_over) elements. Buffers need an n that
            `shard_over` divides.

    Attributes:
        kind: what the variable is: "parameter": optimizers train it; "fp8": state of a product in
            FP8 (see `popxl_addons.fp8`): optimizers leave it alone, and it is never sharded.
        is_input: whether graphs take it; if not, it is only made and kept with the others.

    Raises:
        ValueError: there are no items, or they are no host data; what a callable raises is the
            cause of one, too.
    """

    kind: Kind = "parameter"
    is_input: bool = True

    def __init__(
        self,
        data_iter: DataIter,
        dtype: dtypes.dtype | None = None,
        name: str | None = None,
        by_ref: bool = False,
        replica_grouping: ReplicaGrouping | None = None,
        shard_over: int = 1,
    ) -> None:
        self.data_iter = _iterate_data(data_iter)
        self.name = name
        self.by_ref = by_ref
        first = self._next_item()
        self.replica_grouping = (
            popxl.gcg().ir.replica_grouping() if replica_grouping is None else replica_grouping
        )
        self.data_iter = itertools.chain([first], self.data_iter)
        self.dtype = (
            dtypes.dtype.as_dtype(to_numpy(first, copy=False).dtype) if dtype is None else dtype
        )
        size = self.replica_grouping.const_rg.group_size
        if not 1 <= shard_over <= size:
            raise ValueError(
                f"variable {name!r}: shard_over={shard_over} must be from 1 to {size}, the size of "
                "the groups of its replica grouping"
            )
        self.shard_over = shard_over
        self.replica_sharded = shard_over > 1
        self.shape: tuple[int, ...] = np.shape(first)
        self.meta_shape: tuple[int, ...] = ()
        if self.replica_sharded:
            self.meta_shape = MetaShape(self.shape, shard_over)
            self.shape = (math.prod(self.shape) // shard_over,)

    def _next_item(self) -> Any:
        try:
            item = next(self.data_iter)
        except StopIteration:
            raise ValueError(f"the data for variable {self.name!r} are exhausted") from None
        except Exception as error:
            raise ValueError(
                f"the data for variable {self.name!r} cannot be made: {type(error).__name__}: "
                f"{error}"
            ) from error
        if not isinstance(item, host_scalar_tensor_types):
            advice = "give the function itself, not in a list" if callable(item) else "give arrays"
            raise ValueError(
                f"VariableFactory: an item of the data for variable {self.name!r} is {item!r}, no "
                f"array: {advice}"
            )
        return item

    @property
    def shape_on_replica(self) -> tuple[int, ...]:
        """Shape of the full variable on a replica."""
        return tuple(self.meta_shape) if self.replica_sharded else self.shape

    @property
    def shape_on_host(self) -> tuple[int, ...]:
        """Shape of a variable's host data; axis 0 are the replica groups, if there are several."""
        groups = self.replica_grouping.num_groups
        return ((groups,) if groups > 1 else ()) + self.shape_on_replica

    # ---- graph inputs and variables -------------------------------------------------------------
    def create_input(self, prefix: str | None = None) -> popxl.Tensor:
        """Add a graph input for a variable, or for its shard, to the current graph."""
        return popxl.graph_input(
            self.shape, self.dtype, _join_name(prefix, self.name), self.by_ref, self.meta_shape
        )

    def create_tensor(
        self,
        name: str | None = None,
        empty: bool = False,
        memmap_dir: str | None = None,
        read_only_if_exists: bool = False,
    ) -> popxl.Tensor:
        """Create a full variable on the device, in the main graph.

        Args:
            empty: take zeros instead of drawing data, for variables that are written before use.
            memmap_dir: keep the host data in a file of this folder, see `next_memmap`.
        """
        name = name or self.name
        data = self._initial_data(name, empty, memmap_dir, read_only_if_exists)
        return popxl.variable(data, self.dtype, name, replica_grouping=self.replica_grouping)

    def create_remote_tensor(
        self,
        buffer: popxl.RemoteBuffer,
        entry: int,
        name: str | None = None,
        empty: bool = False,
        memmap_dir: str | None = None,
        read_only_if_exists: bool = False,
    ) -> popxl.Tensor:
        """Create a variable in an entry of a remote buffer, sharded if the buffer is.

        Arguments as for `create_tensor`.
        """
        name = name or self.name
        data = self._initial_data(name, empty, memmap_dir, read_only_if_exists)
        sharded = popxl.remote_replica_sharded_variable
        create = sharded if buffer.meta_shape else popxl.remote_variable
        return create(data, buffer, entry, self.dtype, name, replica_grouping=self.replica_grouping)

    # ---- data -----------------------------------------------------------------------------------
    def _initial_data(
        self, name: str | None, empty: bool, memmap_dir: str | None, read_only_if_exists: bool
    ) -> np.ndarray:
        if memmap_dir is None:
            return self.next_data(empty)
        if name is None:
            raise ValueError("a variable without a name cannot be kept in memmap_dir")
        return self.next_memmap(memmap_dir, name, empty, read_only_if_exists)

    def next_data(self, empty: bool = False) -> np.ndarray:
        """Return the next variable's data, of shape `shape_on_host`; zeros if `empty`.

        Raises:
            ValueError: the data are exhausted, or an item has another shape than the first.
        """
        if empty:
            # All elements share one zero, so that asking for 44 GB of weights costs nothing.
            return np.broadcast_to(np.zeros((), self.dtype.as_numpy()), self.shape_on_host)
        groups = self.replica_grouping.num_groups
        values = [to_numpy(self._next_item(), self.dtype, copy=False) for _ in range(groups)]
        for value in values:
            if value.shape != self.shape_on_replica:
                raise ValueError(
                    f"an item of data for variable {self.name!r} has shape {value.shape}, but the "
                    f"first had {self.shape_on_replica}"
                )
        return values[0] if groups == 1 else np.stack(values)

    def next_memmap(
        self, memmap_dir: str, name: str, empty: bool = False, read_only_if_exists: bool = False
    ) -> np.ndarray:
        """Return the next variable's data as a memory map of `<memmap_dir>/<name>.npy`.

        The file holds the elements alone, without a header, in C order; the groups are the first
        axis. A file that exists is used as it is: it holds the variable of an earlier run.

        Args:
            read_only_if_exists: map such a file read-only; the variable is never written back.

        Raises:
            ValueError: the file holds another dtype or shape, or has another size.
        """
        from popxl_addons.array_files import StoredArray, add_to_index, map_file, read_index

        path = memmap_path(memmap_dir, name)
        required = StoredArray(path.name, self.dtype.name, self.shape_on_host)
        if path.exists():
            held = read_index(path.parent).get(name, required)
            if held.file == required.file and held != required:
                raise ValueError(
                    f"{path} holds {held.dtype} of shape {held.shape}, but variable {name!r} is "
                    f"{required.dtype} of shape {required.shape}: give another folder, or remove it"
                )
            mode = "r" if read_only_if_exists else "r+"
            return map_file(path.parent, required, mode, required.nbytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        made = np.memmap(path, required.host_dtype, "w+", shape=required.shape)
        if not empty:
            made[...] = self.next_data()
        add_to_index(path.parent, {name: required})
        return made

    def __repr__(self) -> str:
        return f"VariableFactory({self.name}: {self.dtype.name}{list(self.shape)})"


def memmap_path(memmap_dir: str | Path, name: str) -> Path:
    """Path of the memory-mapped file of the variable `name`."""
    return Path(memmap_dir) / f"{name}.npy"


def zeros(shape: Sequence[int]) -> Callable[[], np.ndarray]:
    """Return a function that makes arrays of zeros as broadcast views, which take no memory."""
    return partial(np.broadcast_to, np.float32(0), tuple(shape))


def _join_name(prefix: str | None, name: str | None) -> str | None:
    return f"{prefix}.{name}" if prefix and name else name or prefix


class NamedVariableFactories(DotTree[VariableFactory]):
    """A tree of variable factories by name."""

    @property
    def replica_groupings(self) -> NamedReplicaGrouping:
        """Replica grouping of each variable, by name."""
        names, factories = self.unpack()
        return NamedReplicaGrouping.pack(names, [f.replica_grouping for f in factories])

    def of_kind(self, kind: Kind) -> NamedVariableFactories:
        """Return the factories of one kind of variable, such as "parameter"."""
        factories = {n: f for n, f in self.to_dict().items() if f.kind == kind}
        return NamedVariableFactories.from_dict(factories)

    @property
    def inputs(self) -> NamedVariableFactories:
        """The factories of those variables that are graph inputs."""
        return NamedVariableFactories.from_dict(
            {n: f for n, f in self.to_dict().items() if f.is_input}
        )

    def _create_tensors(
        self, create: Callable[[str, VariableFactory], popxl.Tensor]
    ) -> NamedTensors:
        """Create a variable by each factory, in sorted order of the names.

        A seeded generator thus gives each the same data whatever the order of this tree.
        """
        names, factories = self.unpack()
        return NamedTensors.pack(names, map(create, names, factories))

    def init(
        self,
        prefix: str | None = None,
        empty: bool = False,
        memmap_dir: str | None = None,
        read_only_if_exists: bool = False,
    ) -> NamedTensors:
        """Create all variables on the device as `prefix.name`, in the main graph.

        The tree is in the order of sorted dotted names. Arguments as for
        `VariableFactory.create_tensor`.
        """
        return self._create_tensors(
            lambda name, f: f.create_tensor(
                _join_name(prefix, name), empty, memmap_dir, read_only_if_exists
            )
        )

    def init_remote(
        self,
        buffers: NamedRemoteBuffers,
        entry: int = 0,
        prefix: str | None = None,
        empty: bool = False,
        memmap_dir: str | None = None,
        read_only_if_exists: bool = False,
    ) -> NamedTensors:
        """Create all variables in entry `entry` of the equally named buffers, in sorted order.

        Arguments as for `VariableFactory.create_remote_tensor`.
        """
        by_name = buffers.to_dict()
        return self._create_tensors(
            lambda name, f: f.create_remote_tensor(
                by_name[name],
                entry,
                _join_name(prefix, name),
                empty,
                memmap_dir,
                read_only_if_exists,
            )
        )

    def init_zero(self) -> NamedTensors:
        """Create tensors of zeros (not variables) in the current graph, by name."""
        return self._init_ops("zero")

    def init_undef(self) -> NamedTensors:
        """Create tensors of undefined values (not variables) in the current graph, by name."""
        return self._init_ops("undef")

    def _init_ops(self, kind: Any) -> NamedTensors:
        return self._create_tensors(
            lambda name, f: ops.init(f.shape, f.dtype, name, kind, f.meta_shape or None)
        )


def add_variable_input(
    name: str,
    data_iter: DataIter,
    dtype: dtypes.dtype | None = None,
    by_ref: bool = False,
    replica_grouping: ReplicaGrouping | None = None,
) -> tuple[popxl.Tensor, VariableFactory]:
    """Add a graph input for a variable to the current graph; arguments as for `VariableFactory`.

    Returns:
        The input and the factory of its variables.
    """
    factory = VariableFactory(data_iter, dtype, name, by_ref, replica_grouping)
    return factory.create_input(), factory


def add_replica_sharded_variable_input(
    name: str,
    data_iter: DataIter,
    dtype: dtypes.dtype | None = None,
    by_ref: bool = False,
    replica_grouping: ReplicaGrouping | None = None,
    shard_over: int | None = None,
) -> tuple[popxl.Tensor, VariableFactory]:
    """Add a graph input for a replica's shard of a variable; the data are those of the full one.

    Args:
        shard_over: number of shards; default: the size of the groups.
    """
    grouping = popxl.gcg().ir.replica_grouping() if replica_grouping is None else replica_grouping
    shards = grouping.const_rg.group_size if shard_over is None else shard_over
    factory = VariableFactory(data_iter, dtype, name, by_ref, grouping, shards)
    return factory.create_input(), factory
