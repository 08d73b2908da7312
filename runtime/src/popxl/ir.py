"""Intermediate representation: graphs, streams and remote buffers of one program."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

from popxl._compat.session_options import IrHandle
from popxl._ir.analysis_registry import analyses
from popxl._ir.argument_checks import check_integer, check_integers
from popxl.graph import Graph
from popxl.module import Module
from popxl.replica_grouping import ReplicaGrouping

if TYPE_CHECKING:
    from popxl.remote_buffer import RemoteBuffer
    from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
    from popxl.tensor import Tensor

_IDS = itertools.count()


class Ir:
    """Intermediate representation of a program: graphs, streams and remote buffers."""

    def __init__(self, replication: int | Literal["popdist"] = 1) -> None:
        """Creates an empty program.

        Args:
            replication: number of replicas (devices that run the program), or "popdist": as many
                as the distributed environment provides.
        """
        import popdist

        self._id = next(_IDS)
        self._pb_ir = IrHandle(self)
        folder = os.environ.get("POPXL_CACHE_DIR")
        if folder:
            options = self._pb_ir.getSessionOptions()
            options.enableEngineCaching, options.cachePath = True, folder
        self._graph_names: Counter[str] = Counter()
        self._graphs: list[Graph] = []
        self._streams: dict[str, Stream] = {}
        self._buffers: list[RemoteBuffer] = []
        self._host_values: WeakSet[Any] = WeakSet()  # `HostValues` of its sessions
        self._host_lock = RLock()  # of these, and of the arrays that they share
        self._changes = 0  # of graphs, so far
        self._compiled_changes = 0  # those that the latest session has compiled
        self._num_host_transfers = 1
        self._load_window: int | None = None
        if replication == "popdist":
            self._distribute_replicas(popdist.getNumInstances())
            replication = popdist.getNumTotalReplicas()
        self.replication_factor = replication
        self._main_graph = self._new_graph("main")

    # ---- properties -----------------------------------------------------------------------------
    @property
    def main_graph(self) -> Graph:
        return self._main_graph

    @property
    def num_host_transfers(self) -> int:
        """Number of transfers on each host stream in one run of the program."""
        return self._num_host_transfers

    @num_host_transfers.setter
    def num_host_transfers(self, value: int) -> None:
        self._num_host_transfers = check_integer("Ir", "num_host_transfers", value, 1)

    @property
    def load_window(self) -> int | None:
        """Prefetch window: bytes per replica of remote-buffer loads issued ahead of use.

        For devices with memory of their own. Default, None: two layers' entries.
        """
        return self._load_window

    @load_window.setter
    def load_window(self, value: int | None) -> None:
        if value is not None and value < 1:
            raise ValueError(f"load_window must be at least 1 byte, got {value}")
        self._load_window = value

    @property
    def replication_factor(self) -> int:
        """Number of replicas, over all processes.

        It is the session option `globalReplicationFactor` where `enableDistributedReplicatedGraphs`
        is set, otherwise `replicatedGraphCount`. Programs may set these options before they make
        variables.
        """
        options = self._pb_ir.getSessionOptions()
        if options.enableDistributedReplicatedGraphs:
            return int(options.globalReplicationFactor)
        return int(options.replicatedGraphCount)

    @replication_factor.setter
    def replication_factor(self, value: int) -> None:
        count = check_integer("Ir", "replication_factor", value, 1)
        options = self._pb_ir.getSessionOptions()
        if options.enableDistributedReplicatedGraphs:
            instances = options.globalReplicationFactor // options.replicatedGraphCount
            options.globalReplicationFactor, count = count, count // instances
        options.enableReplicatedGraphs, options.replicatedGraphCount = count > 1, count

    def _distribute_replicas(self, num_processes: int) -> None:
        """Gives each process one replica, until the program sets their number."""
        options = self._pb_ir.getSessionOptions()
        options.enableDistributedReplicatedGraphs = True
        options.globalReplicationFactor = num_processes

    @property
    def instance_replication_factor(self) -> int:
        """Number of replicas that this process runs."""
        return int(self._pb_ir.getSessionOptions().replicatedGraphCount)

    @property
    def _num_processes(self) -> int:
        return self.replication_factor // self.instance_replication_factor

    @property
    def id(self) -> int:
        return self._id

    # ---- graphs ---------------------------------------------------------------------------------
    def create_graph(
        self,
        fn: Callable[..., Tensor | Iterable[Tensor] | None] | Module,
        *args: Any,
        **kwargs: Any,
    ) -> Graph:
        """Creates a graph by calling `fn`, or the `build` method of a Module.

        Each Tensor or TensorSpec among the arguments, also inside lists and tuples, becomes an
        input of the graph of that spec, and `fn` gets the input instead. Annotate a parameter
        with `popxl.TensorByRef` to make its inputs by-reference. Other arguments are passed on.
        The tensors that `fn` returns become the outputs.

        Raises:
            TypeError: a list or tuple holds tensors or specs and other things.
            ValueError: the arguments do not fit `fn`; it returns something that is no tensor, or a
                tensor of another graph; or a tensor of another Ir is passed.
        """
        return analyses.build_graph(self, fn, args, kwargs)

    def create_empty_graph(self, name: str | None = None) -> Graph:
        """Creates a graph without inputs, ops or outputs."""
        base = name or "graph"
        self._graph_names[base] += 1
        return self._new_graph(f"{base}_subgraph({self._graph_names[base] - 1})")

    def _new_graph(self, name: str) -> Graph:
        graph = Graph._make(self, name)
        self._graphs.append(graph)
        return graph

    @contextmanager
    def _new_current_graph(self, name: str) -> Iterator[Graph]:
        """Context with a new current graph; if building it raises, it is removed from the Ir."""
        graph = self.create_empty_graph(name)
        try:
            with graph:
                yield graph
        except BaseException:
            self._graphs.remove(graph)
            graph._remove_from_callers()
            raise

    def dot_checkpoint(self, check: str, save_dir: str | Path | None = None) -> None:
        """Writes the current program to `<check>.dot`, if this checkpoint is enabled.

        Chosen are the names in the session option `dotChecks` and, separated by colons, in the
        environment variable POPART_DOT_CHECKS; letter case does not matter, and ALL chooses all.
        If the option is empty and the variable not set, this function makes the option ALL. Each
        session writes the checkpoint "Final".

        Args:
            check: name of the checkpoint.
            save_dir: folder for this and later files: the session option `logDir`.
        """
        options = self._pb_ir.getSessionOptions()
        if save_dir is not None:
            options.logDir = str(save_dir)
            Path(save_dir).mkdir(parents=True, exist_ok=True)
        if not options.dotChecks and "POPART_DOT_CHECKS" not in os.environ:
            options.dotChecks = {"ALL"}
        analyses.write_dot_checkpoint(self, check)

    # ---- streams and buffers --------------------------------------------------------------------
    def _register_stream(self, stream: Stream, name: str) -> str:
        unique, n = name, 0
        while unique in self._streams:
            unique, n = f"{name}__t{n}", n + 1
        self._streams[unique] = stream
        return unique

    def _register_buffer(self, buffer: RemoteBuffer) -> int:
        self._buffers.append(buffer)
        return len(self._buffers)

    @property
    def remote_buffers(self) -> tuple[RemoteBuffer, ...]:
        """All remote buffers, in creation order. Not in PopXL."""
        return tuple(self._buffers)

    def place_like(self, other: Ir) -> None:
        """Places remote-buffer entries as those of another program's corresponding buffers.

        Buffers correspond in the order of creation. Not in PopXL.

        Raises:
            ValueError: the programs have not equally many.
        """
        if len(self._buffers) != len(other._buffers):
            raise ValueError(
                f"the programs have {len(self._buffers)} and {len(other._buffers)} remote buffers, "
                "but must have equally many"
            )
        for own, like in zip(self._buffers, other._buffers, strict=True):
            own.resident, own.on_disk = like.resident_entries, like.on_disk
        self.load_window = other.load_window

    def get_all_d2h_streams(self) -> set[DeviceToHostStream]:
        """Returns the device-to-host streams that the program stores to."""
        return set(analyses.program_effects(self).stores)

    def get_all_h2d_streams(self) -> set[HostToDeviceStream]:
        """Returns the host-to-device streams that the program loads from."""
        return set(analyses.program_effects(self).loads)

    # ---- replicas -------------------------------------------------------------------------------
    def replica_grouping(self, stride: int = 1, group_size: int | None = None) -> ReplicaGrouping:
        """Returns the partition of replicas into groups of `group_size` replicas, `stride` apart.

        Args:
            group_size: default: as many as fit, replication_factor / stride.
        """
        for name, value in {"stride": stride, "group_size": group_size}.items():
            if value is not None:
                check_integer("replica_grouping", name, value, 1)
        return ReplicaGrouping._from_stride(self, stride, group_size)

    def replica_grouping_from_assignments(self, assignment: list[int]) -> ReplicaGrouping:
        """Returns the grouping that puts replica r into group `assignment[r]`."""
        groups = check_integers("replica_grouping_from_assignments", "assignment", assignment)
        return ReplicaGrouping._from_assignment(self, groups)

    # ---- Python ---------------------------------------------------------------------------------
    def __repr__(self) -> str:
        return f"Ir[id={self._id}]"

    def __str__(self) -> str:
        return analyses.format_ir(self)
