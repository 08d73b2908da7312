"""Tensors, variables and constants of a graph, and the functions that create them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from popxl import context, dtypes
from popxl._ir import tensor_operators
from popxl._ir.argument_checks import check_integer, check_integers, check_type
from popxl._ir.host_data import INLINE_BYTES, deduplicate_constant
from popxl._ir.log import logger
from popxl._ir.regions import regions
from popxl._ir.sharding import MetaShape, shard_count, shard_elements
from popxl.errors import UndefinedValue
from popxl.typing_ import HostScalarTensor as HostScalarTensor
from popxl.typing_ import HostTensor as HostTensor
from popxl.typing_ import NewAliasAnnotation
from popxl.typing_ import ScalarType as ScalarType
from popxl.typing_ import host_tensor_types as host_tensor_types
from popxl.utils import downcast_np_dtypes, is_broadcast_zero, to_numpy

if TYPE_CHECKING:
    from popxl._ir.op import Op
    from popxl.graph import Graph
    from popxl.ir import Ir
    from popxl.remote_buffer import RemoteBuffer
    from popxl.replica_grouping import ReplicaGrouping

TILE_SET_MAP = {"compute": "compute", "io": "io"}
RetrievalMode = Literal["one_per_group", "all_replicas"]


class TensorSpec(Mapping):
    """Shape and dtype of a tensor; for a replica-sharded tensor, also the full shape.

    It is a mapping, so `**spec` passes shape and dtype (and meta_shape, if there is one) on.

    Raises:
        TypeError: the shape is no tuple of integers.
        ValueError: a negative size, or no dtype of popxl.
    """

    shape: tuple[int, ...]
    dtype: dtypes.dtype
    meta_shape: MetaShape

    def __init__(
        self, shape: Iterable[int], dtype: dtypes.dtype, meta_shape: Iterable[int] = ()
    ) -> None:
        self.shape = check_integers("TensorSpec", "shape", shape)
        self.dtype = dtypes.dtype.as_dtype(dtype)
        self.meta_shape = MetaShape(meta_shape)

    @classmethod
    def _unchecked(cls, shape: tuple[int, ...], dtype: dtypes.dtype) -> TensorSpec:
        """Creates a spec without checking sizes: unfinished programs can have impossible ones."""
        self = cls((), dtype)
        self.shape = shape
        return self

    def to_dict(self) -> dict[str, Any]:
        """Returns {"shape", "dtype"} and, if set, "meta_shape"."""
        out: dict[str, Any] = {"shape": self.shape, "dtype": self.dtype}
        return {**out, "meta_shape": self.meta_shape} if self.meta_shape else out

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.to_dict().values())

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())

    def __getitem__(self, key: str) -> Any:
        return self.to_dict()[key]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorSpec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.shape, self.dtype, self.meta_shape

    def __repr__(self) -> str:
        meta = f", meta_shape={self.meta_shape}" if self.meta_shape else ""
        return f"TensorSpec(shape={self.shape}, dtype={self.dtype!r}{meta})"


class Tensor(tensor_operators.TensorOperators["Tensor"]):
    """A value in a graph; created by ops and by the functions of this module."""

    __array_priority__ = 1000  # numpy scalars defer to our reflected operators
    __iter__ = None
    __contains__ = None

    _graph: Graph
    _spec: TensorSpec
    _name: str
    _producer: Op | None
    _by_ref: bool
    _ipu: int | None
    _tile_set: str | None

    def __init__(self) -> None:
        raise TypeError(
            f"Cannot create {type(self).__module__}.{type(self).__qualname__} instances directly"
        )

    @classmethod
    def _make(
        cls, graph: Graph, spec: TensorSpec, name: str | None, producer: Op | None = None
    ) -> Any:
        self = object.__new__(cls)
        self._graph, self._spec, self._producer = graph, spec, producer
        self._by_ref = False
        self._ipu = self._tile_set = None
        if producer is not None:
            self._record_placement(producer)
        self._name = graph._register_tensor(self, name)
        return self

    def _record_placement(self, op: Op) -> None:
        known = [t._ipu for t in op.inputs if t._ipu is not None]
        self._ipu = op.ipu if op.ipu is not None else (known[0] if known else 0)
        if context.get_current_context().has_no_ipu:
            self._ipu = None
        sets = [t._tile_set for t in op.inputs if t._tile_set is not None]
        self._tile_set = "io" if op.io else (sets[0] if sets else "compute")

    # ---- identity -------------------------------------------------------------------------------
    @property
    def id(self) -> str:
        """Id, unique in the Ir: `graph/scope/name`; the main graph has no graph prefix."""
        return self._graph._name_prefix + self._name

    @property
    def name(self) -> str:
        """Name of the tensor, with its name scopes."""
        return self._name

    @property
    def scope(self) -> str:
        """Graph and name scopes of the tensor: its id without the last component."""
        return self.id.rpartition("/")[0]

    @property
    def ir(self) -> Ir:
        return self._graph.ir

    # ---- spec -----------------------------------------------------------------------------------
    @property
    def dtype(self) -> dtypes.dtype:
        return self._spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._spec.shape

    @property
    def meta_shape(self) -> MetaShape:
        """Full shape of a replica-sharded tensor; () for other tensors."""
        return self._spec.meta_shape

    @property
    def spec(self) -> TensorSpec:
        return self._spec

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def nelms(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    def strides(self, shape: Iterable[int] | None = None) -> tuple[int, ...]:
        """Returns the bytes between neighbors along each axis of a C-ordered array of `shape`."""
        dims, size = tuple(self.shape if shape is None else shape), self.dtype.as_numpy().itemsize
        return tuple(math.prod(dims[i + 1 :]) * size for i in range(len(dims)))

    # ---- placement ------------------------------------------------------------------------------
    @property
    def location_info(self) -> tuple[int, str]:
        return self.ipu, self.tile_set

    @property
    def ipu(self) -> int:
        """Index of the tensor's virtual device, which is recorded but has no effect on XLA.

        That of the op that makes the tensor; that of a call's argument, for an input of the called
        graph; or else that of an op that takes it.

        Raises:
            UndefinedValue: there is none.
        """
        ipu = self._known_ipu()
        if ipu is None:
            raise UndefinedValue(f"the IPU of {self.id!r} is not known: no op has placed it yet")
        return ipu

    def _known_ipu(self) -> int | None:
        if self._ipu is not None or self._producer is not None:
            return self._ipu
        return next((ipu for ipu in self._neighbor_ipus() if ipu is not None), None)

    def _neighbor_ipus(self) -> Iterator[int | None]:
        """Yields the virtual devices where calls pass an input, then where ops use the tensor."""
        if self in self._graph._inputs:
            at = self._graph._inputs.index(self)
            for site in self._graph._call_sites:
                for region in regions(site):
                    given = region.inputs[at] if region.graph is self._graph else None
                    if given is not None:
                        yield site.inputs[given]._known_ipu()
        for op in self._graph._ops:
            if self in op.inputs:
                yield op.attrs["source"] if op.defn.name == "ipu_copy" else op.ipu
                yield from (t._ipu for t in op.outputs[:1] if op.defn.name != "ipu_copy")

    @property
    def tile_set(self) -> Literal["compute", "io"]:
        """Tile set of the tensor; raises UndefinedValue while no op has placed it."""
        if self._tile_set is None:
            raise UndefinedValue(f"the tile set of {self.id!r} is not known yet")
        return self._tile_set  # type: ignore[return-value]

    @property
    def in_sync_with_ipu(self) -> bool:
        """True if the host's data is current; only an attached session's variables can be stale."""
        return True

    def copy_to_ipu(self, destination: int, source: int | None = None) -> Tensor:
        """Copies the tensor to virtual device `destination`."""
        return tensor_operators.ops.ipu_copy(self, destination, source)

    def diag(self) -> Tensor:
        """Returns the diagonal of a square matrix; raises ValueError for any other shape."""
        if self.rank != 2 or self.shape[0] != self.shape[1]:
            raise ValueError(f"diag needs a square matrix, but {self.id!r} has shape {self.shape}")
        indices = np.arange(self.shape[0]) * (self.shape[0] + 1)
        with self._graph:
            return tensor_operators.ops.gather(self.flatten(), constant(indices, dtypes.int32))

    def _ensure_tensor(self, other: Any) -> Tensor:
        """Returns `other` if it is a tensor, else a constant of this tensor's dtype."""
        if isinstance(other, Tensor):
            return other
        return constant(other, dtype=self.dtype)

    # ---- Python ---------------------------------------------------------------------------------
    def __repr__(self) -> str:
        return f"{type(self).__name__}[{self.id} {self.dtype!r} {self.shape}]"

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Raises TypeError, for NumPy functions called on a tensor of a graph."""
        raise TypeError(
            f"tensor {self.id!r} has no value while the program is written, which NumPy could take:"
            " use popxl.ops, or read a variable by `Session.get_tensor_data`"
        )

    def __float__(self) -> float:
        """Raises TypeError, like `__array__`."""
        raise TypeError(
            f"tensor {self.id!r} is no number while the program is written: use popxl.ops, or read "
            "a variable by `Session.get_tensor_data`"
        )

    def __int__(self) -> int:
        """Raises TypeError, like `__array__`."""
        return int(float(self))

    def __len__(self) -> int:
        if not self.shape:
            raise ValueError(f"tensor {self.id!r} is a scalar and has no length")
        return self.shape[0]


TensorLike = Tensor | ScalarType | HostTensor
if TYPE_CHECKING:
    TensorByRef = Tensor  # a checker reads the annotation as the plain type
else:
    TensorByRef = NewAliasAnnotation("TensorByRef", Tensor)


class _Initialised(Tensor):
    """A tensor with host data: a variable or constant."""

    def copy_to_ipu(self, dst: int, src: int) -> Tensor:  # type: ignore[override]
        """Copies the tensor to virtual device `dst`; `src` is required: host data has no device."""
        return tensor_operators.ops.ipu_copy(self, dst, src)


class Constant(_Initialised):
    """A tensor whose value never changes."""

    _data: np.ndarray

    @property
    def _is_executable_argument(self) -> bool:
        """True if executables take the constant as an argument, not as a literal in their code."""
        return self._data.nbytes > INLINE_BYTES

    @property
    def _content_key(self) -> int:
        """Key shared by large constants with equal data, so that one copy is stored."""
        return id(self._data)


class Variable(_Initialised):
    """A tensor of the main graph whose value persists between runs of a session."""

    _grouping: ReplicaGrouping
    _retrieval: RetrievalMode
    _remote: tuple[RemoteBuffer, int] | None = None  # where it is stored, and by which entry
    _shard: Shard | None = None  # or what the devices hold of it
    _sharded: bool = False

    @cached_property
    def _data(self) -> np.ndarray:
        """Host data of the variable; zeros are created on first access."""
        return np.zeros(self.shape_on_host, self.dtype.as_numpy())

    @property
    def _num_shards(self) -> int:
        """Number of shards of the variable's value.

        Raises:
            ValueError: its remote buffer does not tell.
        """
        if not self._sharded:
            return 1
        if self._shard is not None:
            full_shape, elements = self._shard.spec.meta_shape, self._shard.nelms
        else:
            assert self._remote is not None
            buffer = self._remote[0]
            full_shape, elements = buffer._meta_shape, math.prod(buffer.tensor_shape)
        return shard_count(full_shape, elements, self._grouping.const_rg.group_size)

    @property
    def replica_grouping(self) -> ReplicaGrouping:
        """Grouping of the replicas: those of a group share a value; each group has its value."""
        return self._grouping

    @property
    def retrieval_mode(self) -> RetrievalMode:
        """Values that reading returns: "one_per_group" or "all_replicas"."""
        return self._retrieval

    @property
    def shape_on_replica(self) -> tuple[int, ...]:
        """Shape of one group's value on the host; the full shape for a sharded variable."""
        return self.shape

    @property
    def shape_on_host(self) -> tuple[int, ...]:
        """Shape of the host array; with several groups, it has a leading axis for them."""
        return _group_axis(self._grouping.num_groups) + self.shape_on_replica

    @property
    def _shape_retrieved(self) -> tuple[int, ...]:
        if self._retrieval == "all_replicas":
            return _group_axis(self.ir.replication_factor) + self.shape_on_replica
        return self.shape_on_host

    @property
    def in_sync_with_ipu(self) -> bool:
        """True if no session's devices hold a newer value than the host."""
        return not any(self in values.stale for values in self.ir._host_values)


class Shard(Tensor):
    """A replica's shard of a variable; program state, like a variable."""

    _of: Variable


def _group_axis(n: int) -> tuple[int, ...]:
    return (n,) if n > 1 else ()


# ---- creation -----------------------------------------------------------------------------------
def constant(
    data: HostScalarTensor,
    dtype: dtypes.dtype | None = None,
    name: str | None = None,
    downcast: bool = True,
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> Constant:
    """Creates a constant in the current graph.

    Args:
        data: value; its shape is the tensor's shape.
        dtype: element type; default: that of `data`, downcast from 64 to 32 bits.
        log2_scale, nan_on_overflow: for float8, see `popxl.utils.to_numpy`.
    """
    array = deduplicate_constant(
        to_numpy(data, dtype, downcast, False, log2_scale, nan_on_overflow)
    )
    spec = TensorSpec(array.shape, dtypes.dtype.as_dtype(array.dtype))
    self: Constant = Constant._make(context.get_current_graph(), spec, name or "c")
    self._data = array
    return self


def detached_constant(graph: Graph, data: np.ndarray) -> Constant:
    """Creates a constant for an analysis of `graph`, without adding it to the graph."""
    self: Constant = object.__new__(Constant)
    self._graph, self._producer, self._name = graph, None, "elements"
    self._spec = TensorSpec(data.shape, dtypes.dtype.as_dtype(data.dtype))
    self._data, self._by_ref = deduplicate_constant(data), False
    return self


def variable(
    data: HostScalarTensor,
    dtype: dtypes.dtype | None = None,
    name: str | None = None,
    downcast: bool = True,
    replica_grouping: ReplicaGrouping | None = None,
    retrieval_mode: RetrievalMode | None = None,
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> Variable:
    """Creates a variable in the main graph.

    Args:
        data: initial value. With a grouping of several groups its first axis is the group.
        replica_grouping: replicas that share a value; default: all.
        retrieval_mode: "one_per_group" (default) or "all_replicas".

    Raises:
        ValueError: outside the main graph, or if the first axis is not the number of groups.
    """
    array, grouping = _host_data(data, dtype, downcast, replica_grouping, log2_scale,
                                 nan_on_overflow)  # fmt: skip
    return _new_variable(array, name, grouping, retrieval_mode)


def remote_variable(
    data: HostScalarTensor,
    remote_buffer: RemoteBuffer,
    offset: int = 0,
    dtype: dtypes.dtype | None = None,
    name: str | None = None,
    downcast: bool = True,
    replica_grouping: ReplicaGrouping | None = None,
    retrieval_mode: RetrievalMode | None = "one_per_group",
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> Variable:
    """Creates a variable that is stored in entry `offset` of a remote buffer.

    Use `ops.remote_load` to bring it to the device. Arguments as for `variable`. The entry holds
    the elements of the data, in their order, whatever the shapes are.

    Raises:
        ValueError: the dtype is not the buffer's, the offset is out of range, or the entry holds
            another variable. A session finds a wrong number of elements.
    """
    _check_is_buffer(remote_buffer)
    array, grouping = _host_data(data, dtype, downcast, replica_grouping, log2_scale,
                                 nan_on_overflow)  # fmt: skip
    _check_buffer(remote_buffer, array, offset)
    self = _new_variable(array, name, grouping, retrieval_mode)
    _occupy_entry(self, remote_buffer, offset)
    return self


def remote_replica_sharded_variable(
    data: HostScalarTensor,
    remote_buffer: RemoteBuffer,
    offset: int = 0,
    dtype: dtypes.dtype | None = None,
    name: str | None = None,
    downcast: bool = True,
    replica_grouping: ReplicaGrouping | None = None,
    retrieval_mode: RetrievalMode | None = "one_per_group",
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> Variable:
    """Creates a remote variable of which each replica of a group stores a shard.

    The buffer's entries are shards: ceil(n / shards) elements of the n of the whole, the last
    padded with zeros; `meta_shape` of the buffer is, or becomes, the shape of the whole (see
    `replica_sharded_buffer`). Loading gives the shard, `replicated_all_gather` the whole. The
    variable's `shape` is that of the whole.

    Raises:
        ValueError: as for `remote_variable`; or the buffer holds shards of another shape.
    """
    _check_is_buffer(remote_buffer)
    array, grouping = _host_data(data, dtype, downcast, replica_grouping, log2_scale,
                                 nan_on_overflow)  # fmt: skip
    full_shape = _shape_on_replica(array, grouping)
    if remote_buffer.meta_shape and remote_buffer.meta_shape != full_shape:
        raise ValueError(
            f"the data has shape {full_shape}, but the remote buffer holds shards of "
            f"{remote_buffer.meta_shape}"
        )
    _check_buffer(remote_buffer, array, offset)
    self = _new_variable(array, name, grouping, retrieval_mode)
    self._sharded = True
    _occupy_entry(self, remote_buffer, offset)
    if not remote_buffer.meta_shape:
        remote_buffer.meta_shape = full_shape
    return self


def replica_sharded_buffer(
    shape: tuple[int, ...],
    dtype: dtypes.dtype,
    replica_grouping: ReplicaGrouping | None = None,
    shard_over: int | None = None,
    entries: int = 1,
) -> RemoteBuffer:
    """Creates a remote buffer whose entries are replicas' shards of tensors.

    Args:
        shape: of the data on the host: with a grouping of several groups its first axis is the
            groups, and entries are of the rest.
        replica_grouping: replicas that share the value of the variables; default: all. For one
            without a stride the groups of its `const_rg` count.
        shard_over: number of shards; default: the group size. It must divide the group size.

    Raises:
        ValueError: `shard_over` does not divide the group size, or `shape` lacks the groups' axis.
    """
    const = _grouping_or_all(replica_grouping).const_rg
    full_shape = check_integers("replica_sharded_buffer", "shape", shape)
    if const.num_groups > 1:
        if not full_shape:
            raise ValueError(
                f"the shape on the host must begin with the {const.num_groups} groups of {const!r}"
            )
        full_shape = full_shape[1:]
    shards = _checked_shards("replica_sharded_buffer", const, shard_over)
    return _sharded_buffer(full_shape, dtype, shards, entries)


def _sharded_buffer(
    full_shape: tuple[int, ...], dtype: dtypes.dtype, shards: int, entries: int
) -> RemoteBuffer:
    from popxl.remote_buffer import remote_buffer

    buffer = remote_buffer((shard_elements(full_shape, shards),), dtype, entries)
    buffer.meta_shape = MetaShape(full_shape, shards)
    return buffer


def _checked_shards(
    function_name: str, const_grouping: ReplicaGrouping, shard_over: int | None
) -> int:
    """Returns the requested number of shards; by default, one for each replica of a group."""
    if shard_over is None:
        return const_grouping.group_size
    shards = check_integer(function_name, "shard_over", shard_over, 1)
    if const_grouping.group_size % shards:
        raise ValueError(
            f"shard_over={shards} must divide the group size {const_grouping.group_size} of the "
            "replica grouping"
        )
    return shards


def replica_sharded_variable(
    data: HostScalarTensor,
    dtype: dtypes.dtype | None = None,
    name: str | None = None,
    downcast: bool = True,
    replica_grouping: ReplicaGrouping | None = None,
    shard_over: int | None = None,
    retrieval_mode: RetrievalMode | None = "one_per_group",
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> tuple[Variable, Tensor]:
    """Creates a variable of which each replica of a group holds a shard.

    Returns:
        The variable, through which the host reads and writes the whole, and the tensor of this
        replica's shard. The shard is state: what a run changes of it is there in the next run, and
        in the variable when the weights come to the host.
    """
    array, grouping = _host_data(data, dtype, downcast, replica_grouping, log2_scale,
                                 nan_on_overflow)  # fmt: skip
    shards = _checked_shards("replica_sharded_variable", grouping.const_rg, shard_over)
    self = _new_variable(array, name, grouping, retrieval_mode)
    spec = TensorSpec(
        (shard_elements(self.shape, shards),), self.dtype, MetaShape(self.shape, shards)
    )
    shard: Shard = Shard._make(self._graph, spec, f"{name}_shard" if name else "shard")
    self._sharded, self._shard, shard._of = True, shard, self
    return self, shard


def graph_input(
    shape: Iterable[int],
    dtype: dtypes.dtype,
    name: str | None = None,
    by_ref: bool = False,
    meta_shape: Iterable[int] | None = None,
) -> Tensor:
    """Adds an input to the current graph.

    Args:
        by_ref: changes made to the input in the graph reach the caller's tensor.
        meta_shape: shape of the whole, for a replica-sharded tensor.

    An input of the main graph, which nothing calls, has no value: a session refuses a program that
    reads it.
    """
    graph = context.get_current_graph()
    return graph._add_input(TensorSpec(shape, dtype, meta_shape or ()), name, by_ref)


def graph_output(t: Tensor) -> None:
    """Makes `t` the next output of the current graph; raises ValueError in the main graph."""
    context.get_current_graph()._add_output(t)


# ---- helpers ------------------------------------------------------------------------------------
def _grouping_or_all(grouping: ReplicaGrouping | None) -> ReplicaGrouping:
    from popxl.replica_grouping import ReplicaGrouping

    ir = context.get_ir()
    if grouping is None:
        return ir.replica_grouping()
    check_type("variable", "replica_grouping", grouping, ReplicaGrouping)
    if grouping._ir is not ir:
        raise ValueError(f"replica_grouping {grouping!r} was made by another Ir: make it by this")
    return grouping


def _shape_on_replica(array: np.ndarray, grouping: ReplicaGrouping) -> tuple[int, ...]:
    groups = grouping.num_groups
    if groups == 1:
        return array.shape
    if array.ndim == 0 or array.shape[0] != groups:
        raise ValueError(
            f"the data has shape {array.shape}, but its first axis must be the {groups} groups "
            f"of {grouping!r}"
        )
    return array.shape[1:]


def _host_data(
    data: HostScalarTensor,
    dtype: dtypes.dtype | None,
    downcast: bool,
    replica_grouping: ReplicaGrouping | None,
    log2_scale: int | None,
    nan_on_overflow: bool | None,
) -> tuple[np.ndarray, ReplicaGrouping]:
    """Converts a variable's data to its host array and completes its grouping; memory maps stay.

    Raises:
        ValueError: the data is a memory map of another dtype, of 64-bit elements, or not C-ordered.
    """
    grouping = _grouping_or_all(replica_grouping)
    if isinstance(data, np.ndarray) and is_broadcast_zero(data):
        zero = to_numpy(data[(0,) * data.ndim], dtype, downcast)
        return np.broadcast_to(zero, data.shape), grouping
    if not isinstance(data, np.memmap):
        return to_numpy(data, dtype, downcast, True, log2_scale, nan_on_overflow), grouping
    if dtype is not None and dtype.as_numpy() != data.dtype:
        raise ValueError(
            f"the data is a memory map of {data.dtype}, which is used in place: its dtype cannot "
            f"be {dtype!r}"
        )
    if data.dtype in downcast_np_dtypes:
        raise ValueError(
            f"the data is a memory map of {data.dtype}, which is used in place, but devices have "
            f"no such elements: make a map of {downcast_np_dtypes[data.dtype]}"
        )
    if not data.flags.c_contiguous:
        raise ValueError(
            "the data is a memory map that is not contiguous in C order, so it cannot be used in "
            "place: map the whole file, or pass a copy"
        )
    if grouping.is_const:
        return data, grouping
    logger.warning(
        "a memory map cannot be used in place with the non-const %r: the variable is made of a "
        "copy of it",
        grouping,
    )
    return np.array(data, subok=False), grouping


def _new_variable(
    array: np.ndarray,
    name: str | None,
    grouping: ReplicaGrouping,
    retrieval_mode: RetrievalMode | None,
) -> Variable:
    spec = TensorSpec(_shape_on_replica(array, grouping), dtypes.dtype.as_dtype(array.dtype))
    graph = context.get_current_graph()
    if graph is not graph.main_graph:
        raise ValueError(
            f"variables live in the main graph, but the current graph is {graph.id!r}: create the "
            "variable in the main graph and pass it as an input"
        )
    if retrieval_mode not in (None, "one_per_group", "all_replicas"):
        raise ValueError(f"unknown retrieval_mode {retrieval_mode!r}")
    self: Variable = Variable._make(graph, spec, name)
    if not is_broadcast_zero(array):
        self._data = array
    self._grouping = grouping
    self._retrieval = retrieval_mode or "one_per_group"
    return self


def _check_is_buffer(buffer: object) -> None:
    from popxl.remote_buffer import RemoteBuffer

    check_type("remote_variable", "remote_buffer", buffer, RemoteBuffer)


def _check_buffer(buffer: RemoteBuffer, array: np.ndarray, offset: int) -> None:
    check_integer("remote_variable", "offset", offset, 0)
    dtype = dtypes.dtype.as_dtype(array.dtype)
    if buffer.tensor_dtype != dtype:
        raise ValueError(
            f"data of {dtype.name} does not match the remote buffer's entries of "
            f"{buffer.tensor_dtype.name}"
        )
    if offset >= buffer.entries:
        raise ValueError(f"offset {offset} is outside the remote buffer's {buffer.entries} entries")
    if offset in buffer._variables:
        raise ValueError(
            f"entry {offset} of {buffer!r} holds variable {buffer._variables[offset].id!r}: each "
            "variable needs an entry of its own"
        )


def _occupy_entry(var: Variable, buffer: RemoteBuffer, offset: int) -> None:
    var._remote = (buffer, offset)
    buffer._variables[offset] = var
