"""A configured model in a session: what training and generation have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Self, TypeVar

import numpy as np

import popdist
import popxl
from checkpoints.collective_io import raise_on_all
from config.sections import RunConfig
from modelling.devices import device_desc
from modelling.weights import Variables, WeightMap
from planning.hardware.disk_offload import check_fits, offload_compiled, offload_if_needed
from planning.hardware.memory_check import return_freed_blocks
from popxl import Variable
from popxl_addons import NamedTensors
from terminal.screen import say


class ModelSession:
    """A compiled program of a model. Entering it brings the weights to the devices, and leaving it
    drops them: nothing of them stays on the host, whose memory may be full of them.

    Raises:
        WeightsError: a weight of the program has no row in the table, or the other way round.
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
    ) -> None:
        """Compile `ir`.

        Args:
            variables: the program's, which `weight_map` says the weights of.
            weight_source: a model that is entered while this one is, and lends its weights.
        """
        weight_map.check_complete(variables)
        self.config, self._weight_map, self.variables, self._weight_source = (
            config,
            weight_map,
            variables,
            weight_source,
        )
        if config.execution.host_memory is not None:
            return_freed_blocks()
        shared_bytes = None if weight_source is None else weight_source.host_bytes
        offload_if_needed(config, ir, shared_bytes)
        check_fits(config, ir, shared_bytes)
        self.session = popxl.Session(
            ir, device_desc(config), weights_to_host_on_exit=False, disk=config.execution.disk
        )
        offload_compiled(config, self.session, shared_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the state of this process's replicas takes."""
        ir = self.session.ir
        return popxl.plan.storage_of(ir).remote * ir.instance_replication_factor

    def write(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Set weights, and other state that the program has, from whole tensors by logical name.

        Each is read when the model is entered, at once if it is: from files, or made, one by one;
        by several threads, if the mapping has an attribute `concurrent` that is true.
        What another model lends is not read at all, where both keep it alike.

        Raises:
            ValueError: one is missing. One of the wrong shape is an error when it is read.
        """
        values: dict[Any, Any] = dict(self._weight_map.to_variables(tensors, self.variables))
        if self._weight_source is not None:
            values |= self._weight_source.shared_values(self.variables)
        self.session.write_variables_data(values, concurrent=getattr(tensors, "concurrent", False))

    def shared_values(
        self, program_variables: Variables
    ) -> dict[Variable, Callable[[], np.ndarray]]:
        """This model's values of those variables of another program that are like its own."""
        values = {}
        for name, layers in program_variables.items():
            own = self.variables.get(name)
            if isinstance(layers, NamedTensors) or own is None or isinstance(own, NamedTensors):
                continue
            for theirs, ours in zip(layers, own, strict=True):
                weights = ours.fwd.to_dict()
                for path, t in theirs.fwd.to_dict().items():
                    w = weights.get(path)
                    if w is not None and (w.shape, w.dtype) == (t.shape, t.dtype):
                        values[t] = self.session.borrowed(w)
        return values

    def _run(
        self, inputs: popxl.session.h2dStreamBufferMaps
    ) -> dict[popxl.DeviceToHostStream, np.ndarray]:
        """Run the program once. All processes do so together.

        Args:
            inputs: data for the replicas of this process.

        Returns:
            What each stream gave on the replicas of all processes: (transfers, replicas, ...).
        """
        transfers = self.session.ir.num_host_transfers
        own = {
            stream: output.reshape(transfers, -1, *stream.shape)
            for stream, output in self.session.run(inputs).items()
        }
        if popdist.getNumInstances() == 1:
            return own
        packed = np.concatenate([x.reshape(-1).view(np.uint8) for x in own.values()])
        ends = np.cumsum([x.nbytes for x in own.values()])[:-1]
        parts = np.split(self.session.gather(packed), ends, axis=1)
        return {
            stream: np.concatenate([p.view(x.dtype).reshape(x.shape) for p in everyones], 1)
            for (stream, x), everyones in zip(own.items(), parts, strict=True)
        }

    def __enter__(self) -> Self:
        """Bring the weights to the devices.

        Raises:
            DamagedError: on all processes, if one finds that values in a file are damaged.
        """
        with ExitStack() as stack:
            with raise_on_all():
                stack.enter_context(self.session)
            stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self.session.__exit__(*exc)


Model = TypeVar("Model", bound=ModelSession)


def compile_session(make: Callable[[], Model], what: str) -> Model:
    """The model that `make` makes; says on the screen that it takes a while, and what it took.

    Args:
        what: the program, for people.
    """
    say(f"compiling {what}")
    start = time.perf_counter()
    model = make()
    taken = time.perf_counter() - start
    say(f"ready after {taken:.1f} s: {startup_text(model.session.startup)}")
    return model


def startup_text(startup: popxl.session.Startup) -> str:
    """Say where a program's executables come from."""
    how = "compiled"
    if startup.from_cache:
        missing = startup.compiles > 0
        how = "compiled what the cache does not have" if missing else _FROM_CACHE
    return f"{how} ({startup.traces} traces, {startup.compiles} compilations)"


_FROM_CACHE = "the executable came from the cache"
