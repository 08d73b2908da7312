"""Base class of sessions: a compiled program of a configured model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

import popdist
import popxl
from checkpoints.errors import raise_damage_on_all_processes
from config.sections import RunConfig
from modelling.devices import resolve_device_desc
from modelling.weights import Variables, WeightMap
from planning.hardware.memory_check import (
    NotEnoughMemoryError,
    check_memory,
    release_freed_memory,
)
from popxl import Variable
from popxl_addons import NamedTensors
from terminal.screen import say

if TYPE_CHECKING:
    from modelling.phases.teacher_head import TeacherHead


class ModelSession:
    """A compiled program of a configured model with its state, as a context manager.

    Entering it copies the weights to the devices; leaving it drops them, on the host, too, whose
    memory they can fill.

    Raises:
        WeightsError: a weight of the program is not in the weight map, or the other way round.
        DeviceError: fewer devices than data_parallel x tensor_parallel.
        NotEnoughMemoryError: the state of the program does not fit.
    """

    def __init__(
        self,
        config: RunConfig,
        ir: popxl.Ir,
        weight_map: WeightMap,
        variables: Variables,
        weight_source: ModelSession | None = None,
        teacher_head: TeacherHead | None = None,
    ) -> None:
        """Compile the program `ir`.

        Args:
            variables: the program's variables, by the phases of `weight_map`.
            weight_source: a session whose weights this one shares; it is entered while this one is.
            teacher_head: whose head the program has, too; its weights are written with the model's.
        """
        (
            weight_map if teacher_head is None else teacher_head.extend_weight_map(weight_map)
        ).check_complete(variables)
        self._teacher_head = teacher_head
        self.config, self.variables = config, variables
        self._weight_map, self._weight_source = weight_map, weight_source
        if config.execution.host_memory is not None:
            release_freed_memory()
        shared_bytes = None if weight_source is None else weight_source.host_bytes
        _fit_memory(config, ir, shared_bytes)
        self.session = popxl.Session(
            ir,
            resolve_device_desc(config),
            weights_to_host_on_exit=False,
            disk=config.execution.disk,
        )
        if config.execution.disk is not None:
            from planning.hardware.disk_offload import offload_compiled_program

            offload_compiled_program(config, self.session, shared_bytes)

    @property
    def host_bytes(self) -> int:
        """Host memory in bytes of this process's state: weights and optimizer state."""
        ir = self.session.ir
        return popxl.plan.storage_of(ir).remote * ir.instance_replication_factor

    def write(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Set weights and other state from full (unsharded) tensors by logical name.

        Tensors are read one by one when the session is entered, or now if it is; by several threads
        if the mapping has a true attribute `is_thread_safe`. Weights that are shared with another
        session, and stored equally by both, are not read.

        Raises:
            ValueError: a tensor is missing; wrong shapes are errors when a tensor is read.
        """
        values: dict[Any, Any] = dict(self._weight_map.to_variables(tensors, self.variables))
        if self._teacher_head is not None:
            head_map = self._teacher_head.head_weight_map(self._weight_map)
            values |= head_map.to_variables(self._teacher_head.arrays, self.variables)
        if self._weight_source is not None:
            values |= self._weight_source.value_readers(self.variables)
        self.session.write_variables_data(
            values, concurrent=getattr(tensors, "is_thread_safe", False)
        )

    def value_readers(
        self, program_variables: Variables
    ) -> dict[Variable, Callable[[], np.ndarray]]:
        """Return functions that read this session's values for variables of another program."""
        values = {}
        for name, layers in program_variables.items():
            sources = self.variables.get(name)
            if isinstance(layers, NamedTensors) or isinstance(sources, NamedTensors | None):
                continue
            for layer, source in zip(layers, sources, strict=True):
                weights = source.fwd.to_dict()
                for path, t in layer.fwd.to_dict().items():
                    w = weights.get(path)
                    if w is not None and (w.shape, w.dtype) == (t.shape, t.dtype):
                        values[t] = self.session.share_variable(w)
        return values

    def _run(
        self, inputs: popxl.session.h2dStreamBufferMaps, run: popxl.session.RunFn | None = None
    ) -> dict[popxl.DeviceToHostStream, np.ndarray]:
        """Run the program once, on all processes of the run together.

        Args:
            inputs: data for the replicas of this process.
            run: of an added program; None: the session's own.

        Returns:
            Outputs of the replicas of all processes by stream, (transfers, replicas, ...) each.
        """
        transfers = self.session.ir.num_host_transfers
        local = {
            stream: output.reshape(transfers, -1, *stream.shape)
            for stream, output in (run or self.session.run)(inputs).items()
        }
        if popdist.getNumInstances() == 1:
            return local
        packed = np.concatenate([x.reshape(-1).view(np.uint8) for x in local.values()])
        ends = np.cumsum([x.nbytes for x in local.values()])[:-1]
        gathered = np.split(self.session.all_gather_processes(packed), ends, axis=1)
        return {
            stream: np.concatenate([p.view(x.dtype).reshape(x.shape) for p in outputs], 1)
            for (stream, x), outputs in zip(local.items(), gathered, strict=True)
        }

    def __enter__(self) -> Self:
        """Copy the weights to the devices.

        Raises:
            DamagedCheckpointError: on all processes, if one reads damaged values from a file.
        """
        with ExitStack() as stack:
            with raise_damage_on_all_processes():
                stack.enter_context(self.session)
            stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self.session.__exit__(*exc)


def _fit_memory(config: RunConfig, ir: popxl.Ir, shared_bytes: int | None) -> None:
    """Offload state that exceeds host memory to disk, if one is given.

    Raises:
        DeviceError: fewer devices than replicas.
        NotEnoughMemoryError: the program does not fit; has the bytes of disk with which it would.
    """
    if config.execution.disk is None and config.execution.host_memory is None:
        with suppress(NotEnoughMemoryError):
            check_memory(ir, resolve_device_desc(config), shared_bytes)
            return
    from planning.hardware.disk_offload import check_fits_memory, offload_if_needed

    offload_if_needed(config, ir, shared_bytes)
    check_fits_memory(config, ir, shared_bytes)


Model = TypeVar("Model", bound=ModelSession)


def compile_session(create: Callable[[], Model], name: str) -> Model:
    """Create a session; prints a message before compilation, and the seconds that it took.

    Args:
        name: name of the program in these messages.
    """
    say(f"compiling {name}")
    start = time.perf_counter()
    model = create()
    seconds = time.perf_counter() - start
    say(f"ready after {seconds:.1f} s: {format_executable_origin(model.session.startup_stats)}")
    return model


def format_executable_origin(startup: popxl.session.StartupStats) -> str:
    """Format the origin of a program's executables: compiler or cache."""
    how = "compiled"
    if startup.from_cache:
        missing = startup.compiles > 0
        how = "compiled what the cache does not have" if missing else _FROM_CACHE
    return f"{how} ({startup.traces} traces, {startup.compiles} compilations)"


_FROM_CACHE = "the executable came from the cache"
