"""Sessions: compile a program, run it, and read and write its variables."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np
from jax.errors import JaxRuntimeError

import popdist
from popxl._analysis.verify import (
    check_calls,
    check_no_64_bit_types,
    check_remote_variables,
    check_replicas,
    check_transfer_counts,
    verify_if_enabled,
)
from popxl._compat.session_options import requested_dot_checkpoints
from popxl._compile.executable_cache import StartupStats as StartupStats
from popxl._compile.executable_cache import StartupTimer
from popxl._devices import forks
from popxl._devices.cpu import backend_epoch
from popxl._devices.mesh import create_replicated_sharding, replica_mesh
from popxl._ir.argument_checks import check_type
from popxl._ir.debug_flags import STEPWISE, is_debug_flag_set
from popxl._run import device_variables
from popxl._run.program import Program, ProgramState
from popxl._run.stream_data import HostStreams
from popxl._run.stream_data import d2hStreamBufferMaps as d2hStreamBufferMaps
from popxl._run.stream_data import h2dStreamBufferMaps as h2dStreamBufferMaps
from popxl._schedule.schedule import Schedule
from popxl._storage import replica_arrays
from popxl._storage.host_values import HostValues, SharedValue, storage_sort_key
from popxl._storage.host_values import LazyValue as LazyValue
from popxl._storage.replica_arrays import VariableShard as VariableShard
from popxl.errors import DeviceMemoryError, popart_exception, poplar_application_runtime_error
from popxl.ir import Ir
from popxl.streams import DeviceToHostStream, HostToDeviceStream
from popxl.tensor import Constant, HostTensor, Variable

if TYPE_CHECKING:
    from popxl._compat.popart_handles import DeviceInfo, SessionHandle
    from popxl._run.added_program import AddedProgram
    from popxl.plan import MemoryUse, Plan
    from popxl.timing import Timing

StreamBufferMaps = h2dStreamBufferMaps | d2hStreamBufferMaps
Initialised = TypeVar("Initialised", bound=Variable | Constant)
VariableData = HostTensor | Callable[[], HostTensor]
RunFn = Callable[[h2dStreamBufferMaps], dict[DeviceToHostStream, np.ndarray]]
DeviceDesc = Literal["ipu_hw", "ipu_model", "cpu", "gpu", "tpu"]

_NO_MEMORY = re.compile(r"RESOURCE_EXHAUSTED: (.+?)(?: with allocator| \[|\n|\Z)")
_ROUNDING = 0x726F756E64696E67  # "rounding": what the seeds of rounding are made of, besides a seed


class DiskTraffic(NamedTuple):
    """Bytes of remote-buffer entries read from and written to disk."""

    read: int
    written: int


class Session:
    """Compiles the program of an Ir on creation, runs it, and holds its variables.

    Use it as a context manager: entering loads the variables to the devices, leaving brings them
    back. `run` executes the main graph once.
    """

    def __init__(
        self,
        ir: Ir,
        device_desc: DeviceDesc = "cpu",
        weights_to_host_on_exit: bool = True,
        disk: str | os.PathLike[str] | None = None,
    ) -> None:
        """Compiles the program of `ir`.

        Args:
            ir: the program. The session runs it as it is now: where it is changed later, make
                another session, which this one can be used beside.
            device_desc: "cpu" or "ipu_model" (as many virtual CPU devices as replicas), "gpu",
                "tpu", or "ipu_hw": the best platform present.
            weights_to_host_on_exit: bring the variables back when the session is left.
            disk: folder for the entries that `RemoteBuffer.on_disk` puts into files, while the
                session is attached. Of no other run. Not in PopXL.

        Raises:
            DeviceError: too few devices for the replicas.
            ValueError: `ir.replication_factor` was changed after groupings were made from it.
            popart_exception: the program cannot run as written.
            VersionError: JAX is too new for a CPU.
        """
        check_type("Session", "ir", ir, Ir)
        stopwatch = StartupTimer()
        self.ir_ = ir
        self.weights_to_host_on_exit = weights_to_host_on_exit
        self._disk = disk
        self._device_desc = device_desc
        self._was_attached_stack: list[bool] = []
        self._held: ProgramState | None = None
        self._seeds: Iterator[np.ndarray] | None = None  # None: those of seed 0, to be made
        self._turn = Lock()  # of the thread that runs the program
        self._values = HostValues(ir)
        self._changes = ir._changes
        self._added: list[AddedProgram] = []
        _check_program(ir)
        self._compile()
        if requested_dot_checkpoints(ir._pb_ir.getSessionOptions()):
            ir.dot_checkpoint("Final")
        ir._compiled_changes = ir._changes
        self._startup = stopwatch.elapsed_stats()

    def _compile(self) -> None:
        mesh = replica_mesh(self._device_desc, self._replicas, self.ir._num_processes)
        self._program = Program(self.ir, mesh)
        self._streams = HostStreams(self._program)
        self._epoch = backend_epoch()
        self._program.compile()
        for added in self._added:
            added.compile(mesh, self._program.executable_by_key)

    @property
    def num_executables(self) -> int:
        """Number of compiled executables, with those of added programs. Not in PopXL."""
        programs = [self._program, *(added.program for added in self._added)]
        return len({key for program in programs for key in program.executable_by_key})

    def add_program(self, ir: Ir) -> RunFn:
        """Compiles a further program that runs on this session's variables. Not in PopXL.

        Its structure must be that of the session's program: the same variables, and as many remote
        buffers in the same order. Buffers with equal entries are shared; other ones, such as those
        of activations of another length, are the program's own, and hold nothing between runs.
        So do the session's that correspond to them.

        Args:
            ir: placed as the session's program is. It must not be changed any more.

        Returns:
            A function that runs the program, as `run` does: inputs to outputs by stream.

        Raises:
            ValueError: the variables or the numbers of buffers differ.
            As when a session is created.
        """
        from popxl._run.added_program import AddedProgram

        added = AddedProgram(ir, self.ir)
        _check_program(ir)
        added.compile(self._program.mesh, self._program.executable_by_key)
        ir._compiled_changes = ir._changes
        self._added.append(added)
        return partial(self._run_added, added)

    def _run_added(self, added: AddedProgram, inputs: h2dStreamBufferMaps) -> dict[Any, np.ndarray]:
        outputs = added.streams.create_outputs()
        self._run_in_turn(added.ir, lambda: self._run_program(inputs, outputs, True, added))
        return outputs

    def _ensure_compiled(self) -> None:
        if self._epoch == backend_epoch():
            return
        if self._changes != self.ir._changes:
            raise popart_exception(
                "the program was changed after this session was made, and has to be compiled anew, "
                "since JAX's devices were started anew: make a new session"
            )
        self._compile()

    # ---- properties -----------------------------------------------------------------------------
    @property
    def ir(self) -> Ir:
        return self.ir_

    @property
    def _replicas(self) -> int:
        return self.ir.replication_factor

    @property
    def _state(self) -> ProgramState | None:
        """Device state of the program (variables, buffers); None if the session is not attached."""
        if self._held is not None:
            forks.check_not_forked()
        return self._held

    @_state.setter
    def _state(self, state: ProgramState | None) -> None:
        self._held = state

    @property
    def is_attached(self) -> bool:
        """True if the variables are on the devices."""
        return self._state is not None

    @property
    def startup_stats(self) -> StartupStats:
        """Seconds that creating this session took, and whether it traced and compiled."""
        return self._startup

    def expected_inputs(self) -> list[HostToDeviceStream]:
        """Host-to-device streams for which `run` needs data."""
        return list(self._program.input_streams)

    @property
    def schedule(self) -> Schedule:
        """Schedule of the host's steps in a run; print it to read it."""
        return self._program.schedule

    def memory_use(self) -> MemoryUse:
        """Device and host bytes that one replica uses, with XLA's temporaries as compiled."""
        from popxl.plan import memory_use

        return memory_use(self._program)

    def remote_bytes(self) -> int:
        """Bytes of the remote-buffer entries that this process holds now. Not in PopXL.

        Raises:
            ValueError: the session is not attached.
        """
        if self._state is None:
            raise ValueError("the session is not attached: use `with session:` around remote_bytes")
        return sum(entries.nbytes for entries in self._state.entries.values())

    def code(self, segment: str, stage: Literal["stablehlo", "hlo"] = "hlo") -> str:
        """Returns a segment's StableHLO (before) or HLO (after compilation). Not in PopXL.

        Args:
            segment: its name in the schedule, such as "main.0".

        Raises:
            ValueError: there is no such segment.
        """
        return self._program.code(segment, stage)

    def plan(self) -> Plan:
        """Returns memory, transfers and work of a run (`popxl.plan.plan_of_program`)."""
        from popxl.plan import plan_of_program

        return plan_of_program(self._program)

    # ---- running --------------------------------------------------------------------------------
    def run(
        self, inputs: h2dStreamBufferMaps | None = None, downcast_inputs: bool = True
    ) -> dict[DeviceToHostStream, np.ndarray]:
        """Runs the main graph once and returns the outputs by stream.

        Args:
            inputs: data for each expected stream, of shape (host_transfers, replicas, *shape);
                leading dimensions equal to 1 may be left out. One element may have any shape.
            downcast_inputs: accept 64-bit data for 32-bit streams.

        Returns:
            Data of each device-to-host stream, of shape (host_transfers, replicas, *shape)
            without leading dimensions equal to 1.

        Raises:
            ValueError: the session is not attached; inputs are missing, unexpected or do not fit.
            popart_exception: the program was changed since a session was last made of it.
            poplar_application_runtime_error: values break a rule that a session option asks to
                check. Variables have changed as if they had not.
            DeviceMemoryError: the devices' memory is full.
        """
        outputs = self.create_host_outputs()
        self.run_with_outputs(inputs, outputs, downcast_inputs)
        return outputs

    def run_with_outputs(
        self,
        inputs: h2dStreamBufferMaps | None = None,
        outputs: d2hStreamBufferMaps | None = None,
        downcast_inputs: bool = True,
    ) -> None:
        """Runs like `run`, writing into the arrays of `outputs` (see `create_host_outputs`).

        Raises:
            ValueError: also if an output array is missing or has the wrong shape or dtype.
        """
        self._run_in_turn(
            self.ir, lambda: self._run_program(inputs, outputs, downcast_inputs, None)
        )

    def _run_in_turn(self, ir: Ir, run: Callable[[], None]) -> None:
        """Runs a program of `ir`; raises if another thread runs this session."""
        if not self._turn.acquire(blocking=False):
            raise popart_exception(
                "run: the session runs already, in another thread: give each thread a session"
            )
        try:
            self._check_attached("run")
            _check_is_compiled(ir)
            timing = self._program.timing
            with nullcontext() if timing is None else timing.measure_run():
                run()
        finally:
            self._turn.release()

    def _run_program(
        self,
        inputs: h2dStreamBufferMaps | None,
        outputs: d2hStreamBufferMaps | None,
        downcast_inputs: bool,
        added: AddedProgram | None,
    ) -> None:
        """Runs the session's own program, or one that was added to it."""
        assert self._state is not None
        program, streams = self._program, self._streams
        if added is not None:
            program, streams = added.program, added.streams
            program.timing = self._program.timing
        with _device_memory_named():
            data = streams.inputs_to_devices(inputs or {}, downcast_inputs)
        targets = streams.check_outputs(outputs or {})
        # The program takes the state over. If it stops, the state is gone.
        seed, state = self._next_seed(), self._state
        may_change = device_variables.changeable_variables(program)
        self._values.begin_run(may_change if added is None else added.owners_of(may_change))
        self._state = None
        used = state if added is None else added.share_state(state)
        with self._collective_section(), _device_memory_named():
            try:
                results = program.run(used, data, seed)
            except poplar_application_runtime_error:
                self._store_state(state, used, added)  # a value broke a rule; the run is complete
                raise
            self._store_state(state, used, added)
            streams.fetch_outputs(results, targets)

    def _collective_section(self) -> AbstractContextManager[None]:
        """Context of work that all processes of the program do together, with collectives."""
        return popdist.collective_section() if self.ir._num_processes > 1 else nullcontext()

    @contextmanager
    def timing(self, synchronize: bool = False) -> Iterator[Timing]:
        """Context that times the labelled regions (`popxl.plan.part`) of the runs inside.

            with session.timing() as times:
                session.run(inputs)
            print(times.parts["encoder/forward"].runs.seconds)

        Results stay the same, to the bit.

        Args:
            synchronize: wait for each step of the schedule before dispatching the next. Times are
                then each step's own, without overlap; else they are the host's times for
                dispatching and waiting, as the program runs.

        Raises:
            popart_exception: the session is measured already.
        """
        if self._program.timing is not None:
            raise popart_exception("timing: the session is measured already: leave that one first")
        from popxl.timing import Timing

        timing = Timing(synchronize or is_debug_flag_set(STEPWISE))
        self._program.timing = timing
        try:
            yield timing
        finally:
            self._program.timing = None

    def wait_until_idle(self) -> None:
        """Waits for all device work and all transfers; a run waits for its outputs only."""
        self._wait_all(self._state)

    def _wait_all(self, state: ProgramState | None = None) -> None:
        for program in (self._program, *(added.program for added in self._added)):
            program.wait_all(state)

    def _store_state(
        self, state: ProgramState, used: ProgramState, added: AddedProgram | None
    ) -> None:
        """Stores the device state after a run, and marks the variables that it changed.

        Args:
            used: the state as the program that ran sees it.
        """
        program = self._program if added is None else added.program
        changed = device_variables.take_changed_variables(program, used)
        if added is None:
            for buffer in {
                b for one in self._added for b in one.unshared_buffers
            } & state.entries.keys():
                state.entries[buffer].drop_entries()
        else:
            added.return_state(used, state)
            changed = added.owners_of(changed)
        self._state = state
        self._values.end_run(changed)

    def _seed_random_numbers(self, seed: int) -> None:
        """Restarts the random numbers of stochastic rounding from `seed` (64 bits)."""
        from popxl.random_seed import counter_seeds, uint64_to_two_uint32

        uint64_to_two_uint32(seed)  # refuses what is no seed
        # Not the numbers that programs make of the same seed, for dropout for example.
        self._seeds = (counter_seeds(seed ^ _ROUNDING, run)[0] for run in count())

    def _next_seed(self) -> jax.Array | None:
        """Returns a run's seed of stochastic rounding; None if no op of the program needs it."""
        if not self._program.rounds_stochastically:
            return None
        if self._seeds is None:
            self._seed_random_numbers(0)
        assert self._seeds is not None
        return replica_arrays.put_async(
            next(self._seeds), create_replicated_sharding(self._program.mesh)
        )

    def _full_input_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a stream's host array in a run, given the shape of one transfer.

        Leading axes for host transfers and replicas, where there are several.
        """
        return self._streams.full_shape(shape)

    def create_host_outputs(self) -> dict[DeviceToHostStream, np.ndarray]:
        """Returns zero-filled arrays for the results of each device-to-host stream."""
        return self._streams.create_outputs()

    # ---- variables: host <-> device -------------------------------------------------------------
    def weights_from_host(self) -> None:
        """Copies the variables from the host to the devices.

        Raises:
            ValueError: the session is not attached.
        """
        if not self._was_attached_stack:
            self._check_attached("weights_from_host")
        self._upload("weights_from_host")

    def weights_to_host(self) -> None:
        """Copies the variables from the devices to the host.

        Variables in memory maps are written to their files.

        Raises:
            ValueError: the session is not attached, or a variable is a read-only memory map.
            popart_exception: a run stopped in the middle.
        """
        self._check_attached("weights_to_host")
        read_only = self._values.read_only
        if read_only is not None:
            raise ValueError(
                f"weights_to_host: variable {read_only.id!r} is a read-only memory map: open it "
                "with mode 'r+' or 'c'"
            )
        self._download(self._values.variables)
        self._values.flush()

    def _check_attached(self, method_name: str) -> None:
        if self._state is None and not self._was_attached_stack:
            raise ValueError(
                f"{method_name}: the session is not attached: use `with session:` around it"
            )
        self._values.check_complete(method_name)
        if self._state is None:
            raise popart_exception(
                f"{method_name}: a run or weights_from_host stopped in the middle, and took the "
                "program's state along: call weights_from_host, which begins anew with the host's "
                "values"
            )

    def _upload(self, error_prefix: str) -> None:
        self._values.check_complete(error_prefix)
        disk_queue = device_variables.open_disk_queue(self._program, self._disk)
        self._wait_all()
        self._values.stale.clear()
        self._state = None  # before what takes its place; the folder stays open meanwhile
        self._state = device_variables.upload_variables(self._program, self._values, disk_queue)

    def _download(self, variables: Iterable[Variable]) -> None:
        """Updates the host arrays of `variables` from the devices."""
        for var in sorted((v for v in variables if v in self._values.stale), key=storage_sort_key):
            self._values.set_from_device(var, self._fetch_variable(var))

    def _fetch_variable(self, var: Variable) -> np.ndarray:
        """Returns a variable's value from the devices, possibly as a view of their memory."""
        assert self._state is not None
        with self._collective_section():
            return device_variables.fetch_variable(self._program, self._state, var)

    # ---- variables: user ------------------------------------------------------------------------
    def get_tensor_data(self, tensor: Variable | Constant) -> np.ndarray:
        """Returns the data of a variable or constant, fetched from the devices if attached.

        Returns:
            The live host array (not a copy): `shape_on_host`, or with retrieval mode
            "all_replicas" (replicas, *shape).
        """
        return self.get_tensors_data([tensor])[tensor]

    def get_tensors_data(self, tensors: Iterable[Initialised]) -> dict[Initialised, np.ndarray]:
        """Returns the data of several tensors at once, like `get_tensor_data`.

        Raises:
            TypeError: a tensor is neither variable nor constant.
            ValueError: a tensor belongs to another Ir.
        """
        tensors, values = list(tensors), self._values
        for t in tensors:
            values.check_tensor(t, Variable, Constant)
        variables = [t for t in tensors if isinstance(t, Variable)]
        for var in variables:
            values.check_not_lost(var)
        if self.is_attached and values.read_only is None:
            self._download(variables)
        return {t: values.current_host_array(t) for t in tensors}

    def read_variable_data(self, variable: Variable) -> np.ndarray:
        """Returns a copy of a variable's value, fetched from the devices if attached.

        Other than `get_tensor_data` it leaves the host array alone, so that nothing stays on the
        host: a state as large as its memory can be read variable by variable. Variables that share
        a remote buffer are best read one after the other.

        Raises:
            TypeError, ValueError: as for `get_tensors_data`.
        """
        self._check_readable(variable)
        if self.is_attached and variable in self._values.stale:
            return np.array(self._fetch_variable(variable))
        if variable._retrieval == "all_replicas":
            return np.array(self._values.current_host_array(variable))
        return np.array(self._values.value(variable))

    def _check_readable(self, variable: Variable) -> None:
        self._values.check_tensor(variable, Variable)
        self._values.check_not_lost(variable)

    def all_gather_processes(self, array: np.ndarray) -> np.ndarray:
        """All-gathers an array over processes, through the devices: (processes, *shape).

        All processes call it with arrays of one shape and dtype. Not in PopXL.
        """
        from popxl._run.process_gather import all_gather_processes

        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        with self._collective_section():
            everyones = all_gather_processes(flat, self._program.mesh)
        return everyones.view(array.dtype).reshape(-1, *array.shape)

    def variable_shards(self, variable: Variable) -> tuple[VariableShard, ...]:
        """Returns the shards of a variable's value, equal on every process. Not in PopXL.

        Variables sharded in the same way get the same object.

        Raises:
            TypeError, ValueError: as for `get_tensors_data`.
        """
        self._values.check_tensor(variable, Variable)
        return device_variables.shards_of_variable(self._program, variable)

    def read_variable_shard(self, variable: Variable, shard: VariableShard) -> np.ndarray:
        """Returns the elements (size,) of a shard that this process holds.

        Other processes are not asked, as `read_variable_data` asks them. Not in PopXL.
        """
        self._check_readable(variable)
        if self._state is not None and variable in self._values.stale:
            array = device_variables.local_shard(
                self._program, self._state, variable, shard.replicas
            )
        else:
            array = self._values.value_on_replica(variable, shard.replicas[0])
        return np.array(array.reshape(-1)[: shard.size]).view(variable.dtype.as_numpy())

    def write_variable_data(self, tensor: Variable, data: VariableData) -> None:
        """Writes host data to a variable, and to the devices if attached.

        Args:
            data: the value, or a function that makes it. The function is called each time the value
                is needed, such as when the session is entered, and what it returns is not kept: a
                state as large as the host's memory can be written variable by variable. It must
                always return the same.

        Raises:
            TypeError: not a variable.
            ValueError: the data has the wrong shape, the variable is of another Ir, or it is
                stored in a read-only memory map.
            NotImplementedError: retrieval mode "all_replicas" with groups of several replicas.
        """
        self.write_variables_data({tensor: data})

    def write_variables_data(
        self, tensors: Mapping[Variable, VariableData], concurrent: bool = False
    ) -> None:
        """Writes several variables at once, like `write_variable_data`.

        Args:
            concurrent: functions among the data do not need each other, and any thread may call
                them: several are called at a time. Not in PopXL.

        Of several processes each makes what it holds, if a value is `LazyValue`, which is not of
        PopXL.
        """
        values = self._values
        converted = {var: values.convert(var, data) for var, data in tensors.items()}
        for var, data in converted.items():
            values.write(var, data, concurrent)
        if self._state is not None:
            values.begin_run(
                converted
            )  # if this stops, the devices hold something else than the host
            for var in device_variables.put_variables(
                self._program, self._state, converted, values
            ):
                values.lost.discard(var)

    def share_variable(self, variable: Variable) -> Callable[[], np.ndarray]:
        """Returns a function that shares a variable's value with another session. Not in PopXL.

        Pass it to `write_variables_data` of that session.

        An entry of a remote buffer is not copied where the other session's buffer is alike: while
        that session is attached, this one must not run. In all other cases the value is read when
        the other session needs it.

        Raises:
            TypeError, ValueError: as for `get_tensors_data`.
        """
        self._values.check_tensor(variable, Variable)
        read = partial(self.read_variable_data, variable)
        return SharedValue(variable, lambda: self._state, read)

    @property
    def disk_traffic(self) -> DiskTraffic:
        """Bytes of buffer entries read from and written to disk since the session was entered.

        Not in PopXL.

        Raises:
            ValueError: the session is not attached.
        """
        self._check_attached("disk_traffic")
        assert self._state is not None
        disk_queue = self._state.disk_queue
        if disk_queue is None:
            return DiskTraffic(0, 0)
        return DiskTraffic(disk_queue.scratch.read, disk_queue.scratch.written)

    def disk_idle_clock(self) -> Callable[[], float]:
        """Returns a function for the seconds that the oldest open disk request has taken.

        Any thread can call it while the program runs, until the session is left. Not in PopXL.

        Raises:
            ValueError: the session is not attached.
        """
        self._check_attached("disk_silence")
        assert self._state is not None
        scratch = None if self._state.disk_queue is None else self._state.disk_queue.scratch
        return lambda: 0.0 if scratch is None else scratch.oldest_request_seconds

    # ---- context manager ------------------------------------------------------------------------
    def __enter__(self) -> Session:
        was_attached = self.is_attached
        self._attach()
        self._was_attached_stack.append(was_attached or bool(self._was_attached_stack))
        return self

    def _attach(self) -> None:
        if not self.is_attached:
            forks.check_not_forked()
            with _device_memory_named():
                self._ensure_compiled()
                self._upload("the session cannot be entered")

    @cached_property
    def _pb_session(self) -> SessionHandle:
        """PopART's session, through which some applications load the engine."""
        from popxl._compat.popart_handles import SessionHandle

        return SessionHandle(self)

    @cached_property
    def _device(self) -> DeviceInfo:
        """PopART's device, which some applications share with another session."""
        from popxl._compat.popart_handles import DeviceInfo

        device = DeviceInfo()
        device._sessions.add(self)
        return device

    def _set_device(self, device: DeviceInfo) -> None:
        """Attaches the session to the device handle of another session."""
        self._device = device
        device._sessions.add(self)

    def __exit__(self, exc_type: Any, exc_value: Any, exc_tb: Any) -> None:
        if self._was_attached_stack.pop() or forks.is_forked():
            return
        brings_back = self.weights_to_host_on_exit and self._values.read_only is None
        try:
            if brings_back and self.is_attached:
                self.weights_to_host()
        finally:
            state, self._state = self._state, None
            self._values.detach(brings_back)
            self._wait_all()
            if state is not None:
                state.close()


# ---- helpers ------------------------------------------------------------------------------------
@contextmanager
def _device_memory_named() -> Iterator[None]:
    """Context that turns XLA's out-of-memory errors into `DeviceMemoryError`.

    JAX raises them as one of two types.
    """
    try:
        yield
    except (JaxRuntimeError, ValueError) as error:
        found = _NO_MEMORY.search(str(error))  # not first in what a stream says later
        if found is None:
            raise
        raise DeviceMemoryError(f"the memory of the devices is full: {found[1]}") from error


def _check_is_compiled(ir: Ir) -> None:
    """Raises if the main graph, or one that it runs, has changed since a session was last created.

    The program would silently run without the changes.
    """
    if ir._changes == ir._compiled_changes:
        return
    reached = {g: g for g in ir._graphs if g._changed_at > ir._compiled_changes}
    waiting = list(reached)
    while waiting:
        graph = waiting.pop()
        users = [user for user in graph._users if user not in reached]
        reached |= dict.fromkeys(users, reached[graph])
        waiting += users
    changed = reached.get(ir.main_graph)
    if changed is not None:
        last = changed._ops[-1] if changed._ops else None
        where = f" (its last op is {last.name} at {last.location})" if last else ""
        raise popart_exception(
            f"run: graph {changed.id!r}{where} was changed after this session was made: make a new "
            "session of the Ir"
        )
    ir._compiled_changes = ir._changes


def _check_program(ir: Ir) -> None:
    """Raises if replicas, calls, remote variables, dtypes or transfers of a program are invalid."""
    _check_patterns(ir)
    check_replicas(ir)
    check_calls(ir)
    check_remote_variables(ir)
    check_no_64_bit_types(ir)
    verify_if_enabled(ir)
    check_transfer_counts(ir)


def _check_patterns(ir: Ir) -> None:
    if getattr(ir, "_patterns_applied", False):
        return
    for graph in ir._graphs:
        for op in graph._ops:
            if "needs_patterns" in op.defn.tags:
                raise popart_exception(
                    f"{op.name} at {op.location} needs popxl_addons.patterns."
                    "apply_pre_alias_patterns(ir) before the session is created"
                )
