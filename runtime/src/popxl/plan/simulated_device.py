"""Simulated device for the schedule executor; each of its streams is a simulated clock.

The rules are those of XLA's GPU client (StreamExecutor):

- Executables run one after the other, each once its arguments are available.
- A copy starts when all compute dispatched before it is done, since the memory that it goes to may
  be in use until then. Copies are put on four streams in turn, and wait for what is before them on
  their stream; so the executor keeps the directions on streams of their own
  (`popxl._storage.device_put.device_put_interleaved`). Each direction of the link moves one array
  after the other.
- The host dispatches; each dispatch takes it some time, and so does each kernel. So many executions
  may wait to run.
- Entries on disk are read in the order of their loads, ahead of them by a number of bytes, and
  written once they are in host memory; of the two, what can begin first does
  (`popxl._storage.disk_queue`). Where devices have memory of their own, the host copies what
  was read to memory that they reach, and from there what is written.
- Device memory is taken when something is dispatched, and free again when the host drops it; what
  is copied to the host stays until it has arrived.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from popxl._run.schedule_executor import RunGlobals, ScheduleExecutor
from popxl._schedule.schedule import Load, Run, Schedule, Store, Transfer
from popxl._schedule.schedule_walk import FetchedScalars
from popxl._schedule.segment import nbytes_of, result_specs
from popxl._storage.disk_window import READ_AHEAD_BYTES, WRITE_BEHIND_BYTES, fits_byte_window
from popxl._storage.prefetch import PrefetchMover
from popxl.plan.device_allocator import DeviceAllocator
from popxl.plan.events import lookahead_events
from popxl.plan.rates import Rates

if TYPE_CHECKING:
    from popxl._schedule.schedule import Index
    from popxl._schedule.schedule_walk import Steps
    from popxl._schedule.segment import Segment
    from popxl.remote_buffer import RemoteBuffer

STREAMS = 4
"""That XLA puts copies on in turn, whichever way they go."""

Stream = Literal["compute", "copies in", "copies out", "disk", "host"]


class StreamActivity(NamedTuple):
    """An activity on one of the simulated device's streams, from `start` to `end` (seconds).

    Attributes:
        part: label of the region (`popxl.plan.part`) that dispatched it.
        nbytes: bytes that are transferred.
    """

    stream: Stream
    name: str
    part: str
    start: float
    end: float
    nbytes: int = 0


class SimulatedArray:
    """Array without data, with its bytes and the time from which it is available."""

    __slots__ = ("_address", "_deleted", "_device", "nbytes", "ready")

    def __init__(
        self,
        device: SimulatedDevice,
        nbytes: int,
        ready: float = 0.0,
        in_device_memory: bool = True,
        donor: SimulatedArray | None = None,
    ) -> None:
        """Allocates device memory for the array.

        Args:
            in_device_memory: false if it is elsewhere.
            donor: a donated array of equal size, whose memory it takes.
        """
        self.nbytes, self.ready = nbytes, ready
        self._device, self._deleted = device, False
        self._address: int | None = None
        if donor is not None:
            self._address, donor._address = donor._address, None
        elif in_device_memory:
            self._address = device.allocate(nbytes)

    def __del__(self) -> None:
        if self._address is not None:  # `release` would take time to call
            self._device.free(self._address, self.nbytes)

    @property
    def is_in_device_memory(self) -> bool:
        """True if the simulated array is in device memory."""
        return self._address is not None

    def release(self) -> None:
        """Frees the device memory of the simulated array."""
        if self._address is not None:
            self._device.free(self._address, self.nbytes)
            self._address = None

    def delete(self) -> None:
        """Frees the device memory of the simulated array, and marks it as deleted."""
        self.release()
        self._deleted = True

    def is_deleted(self) -> bool:
        return self._deleted

    def is_ready(self) -> bool:
        return self.ready <= self._device.host

    def block_until_ready(self) -> SimulatedArray:
        self._device.wait_until(self.ready)
        return self


class SimulatedDevice:
    """Simulated clocks (seconds) of one device's streams and of its host.

    Attributes:
        host: clock of the host.
        part: label of the region that the host dispatches.
        live, peak: allocated bytes of device memory, and their peak.
        allocator: addresses of the allocations.
        spans: activities of the streams, in order of dispatch.
        exposed: idle seconds by region: those that wait for transfers, and for the host.
    """

    def __init__(
        self,
        rates: Rates,
        seconds: Callable[[Segment], float],
        temporaries: Callable[[Segment], int],
        dispatch: Callable[[Segment], float] = lambda _: 0.0,
    ) -> None:
        self.rates, self._seconds, self._temporaries = rates, seconds, temporaries
        self._dispatch_seconds = dispatch
        self.has_own_memory = rates.has_own_memory
        self.host = self._compute = 0.0
        self._streams, self._copies = [0.0] * STREAMS, 0
        self._in, self._out = LinkDirection(), LinkDirection()
        self.part = ""
        self.live = self.peak = 0
        self.allocator = DeviceAllocator()
        self.spans: list[StreamActivity] = []
        self.exposed: dict[str, tuple[float, float]] = {}
        self._waited_until = 0.0
        self._ends: deque[float] = deque()
        self._outgoing: deque[tuple[float, Any]] = deque()
        self._disk = SimulatedDisk(self)
        self._result_bytes = cache(_result_bytes)

    @property
    def end(self) -> float:
        """Time (seconds) at which all dispatched work is done."""
        return max(self.host, self._compute, self._in.end, self._out.end, self._disk.clock)

    # ---- memory ---------------------------------------------------------------------------------
    def allocate(self, nbytes: int) -> int:
        """Allocates simulated device memory; returns its address."""
        while self._outgoing and self._outgoing[0][0] <= self.host:
            self._outgoing.popleft()
        self.live += nbytes
        if self.live > self.peak:
            self.peak = self.live
        return self.allocator.allocate(nbytes)

    def free(self, address: int, nbytes: int) -> None:
        """Frees simulated device memory at an address."""
        self.live -= nbytes
        self.allocator.free(address)

    def create_array(self, nbytes: int, on_device: bool) -> SimulatedArray:
        """Returns a simulated array that is available from the start of the run."""
        return SimulatedArray(self, nbytes, in_device_memory=on_device)

    # ---- the host -------------------------------------------------------------------------------
    def wait_until(self, time: float) -> None:
        """Makes the simulated host wait until a time (seconds)."""
        if time > self.host:
            self.host = self._waited_until = time

    def _dispatch(self, name: str, seconds: float) -> None:
        self.spans.append(StreamActivity("host", name, self.part, self.host, self.host + seconds))
        self.host += seconds

    # ---- interface of the executor --------------------------------------------------------------
    def run_segment(self, segment: Segment, arguments: Sequence[Any]) -> list[Any]:
        """Simulates the run of a segment and returns its result arrays."""
        if len(self._ends) >= self.rates.max_in_flight:
            self.host = max(self.host, self._ends.popleft())
        self._dispatch(segment.name, self._dispatch_seconds(segment))
        ready = 0.0
        for array in arguments:
            if isinstance(array, SimulatedArray) and array.ready > ready:
                ready = array.ready
        end = self._run_on_compute_stream(segment.name, ready, self._seconds(segment))
        donated = [arguments[i] for i in segment.donated]
        sizes, others = self._result_bytes(segment)
        results = [
            SimulatedArray(self, nbytes, end, donor=_find_by_size(donated, nbytes))
            for nbytes in sizes
        ]
        for array in donated:
            array.delete()
        results += [SimulatedArray(self, 0, end, in_device_memory=False) for _ in range(others)]
        if temporaries := self._temporaries(segment):
            self.free(self.allocate(temporaries), temporaries)
        return results

    def _run_on_compute_stream(self, name: str, ready: float, seconds: float) -> float:
        start = max(self.host, self._compute, ready)
        idle = start - self._compute
        if idle > 0:
            late = max(ready, min(self._waited_until, self.host)) - self._compute
            transfers = min(max(late, 0.0), idle)
            before = self.exposed.get(self.part, (0.0, 0.0))
            self.exposed[self.part] = before[0] + transfers, before[1] + idle - transfers
        self._compute = start + seconds
        self._ends.append(self._compute)
        self.spans.append(StreamActivity("compute", name, self.part, start, self._compute))
        return self._compute

    def put_number(self, value: int, spec: Any) -> None:
        """Does nothing, since numbers of the host count as on the device already."""

    def copy_array(self, array: SimulatedArray) -> SimulatedArray:
        """Simulates the copy of an array within device memory."""
        self._dispatch("copy", self.rates.dispatch_s)
        end = self._run_on_compute_stream(
            "copy", array.ready, 2 * array.nbytes / self.rates.bandwidth
        )
        return SimulatedArray(self, array.nbytes, end)

    def transfer_arrays(
        self, arrays: Sequence[SimulatedArray], to: Sequence[str]
    ) -> list[SimulatedArray]:
        """Simulates transfers of arrays "to" the device or the host, each with a spacer copy."""
        cost = self.rates.transfer_dispatch_s + 2 * self.rates.per_array_s * len(arrays)
        self._dispatch(f"move {len(arrays)} arrays", cost)
        return [
            self._copy_to_device(array) if where == "device" else self._copy_to_host(array)
            for array, where in zip(arrays, to, strict=True)
        ]

    def _next_copy_stream(self) -> int:
        """Returns the index of the device stream that runs the next copy."""
        self._copies += 1
        return self._copies % STREAMS

    def _put_spacer(self) -> None:
        i = self._next_copy_stream()
        self._streams[i] = (
            max(self._streams[i], self._compute, self.host) + self.rates.copy_latency_s
        )

    def _copy_to_device(self, array: SimulatedArray) -> SimulatedArray:
        start, end = self._copy_over_link(array, self._in, self._out)
        self._put_spacer()
        self.spans.append(StreamActivity("copies in", "load", self.part, start, end, array.nbytes))
        return SimulatedArray(self, array.nbytes, end)

    def _copy_to_host(self, array: SimulatedArray) -> SimulatedArray:
        self._put_spacer()
        start, end = self._copy_over_link(array, self._out, self._in)
        self.spans.append(
            StreamActivity("copies out", "store", self.part, start, end, array.nbytes)
        )
        self._outgoing.append((end, array))
        return SimulatedArray(self, array.nbytes, end, in_device_memory=False)

    def _copy_over_link(
        self, array: SimulatedArray, direction: LinkDirection, opposite: LinkDirection
    ) -> tuple[float, float]:
        """Simulates a transfer over the host link; returns its start and end time."""
        stream = self._next_copy_stream()
        after = max(self.host, self._compute, array.ready, self._streams[stream])
        both = opposite.end > max(after, direction.end)
        start, end = direction.reserve(
            after, self.rates.transfer_seconds(array.nbytes, both), self.host
        )
        self._streams[stream] = end
        return start, end

    # ---- the disk -------------------------------------------------------------------------------
    def read(self, entry: SimulatedArray) -> None:
        """Simulates the disk read of a remote-buffer entry, for which the host waits."""
        self._disk.read(entry)

    def write(self, entry: SimulatedArray) -> None:
        """Simulates the disk write of a remote-buffer entry once it is in host memory."""
        self._disk.write(entry)

    def finish_writes(self) -> None:
        """Makes the simulated host wait for all pending disk writes."""
        self._disk.finish_writes()


_END = itemgetter(1)


def _find_by_size(arrays: Sequence[SimulatedArray], nbytes: int) -> SimulatedArray | None:
    """Returns the first array in device memory with `nbytes`; None if there is none."""
    return next((a for a in arrays if a.nbytes == nbytes and a.is_in_device_memory), None)


def _result_bytes(segment: Segment) -> tuple[list[int], int]:
    """Returns the bytes of each of a segment's results, and the number of its host streams.

    Streams take no memory.
    """
    sizes = [nbytes_of([spec]) for spec in segment.result_specs]
    return sizes, len(result_specs(segment)) - len(sizes)


class LinkDirection:
    """One direction of the host link: one transfer at a time, in its first free interval.

    Attributes:
        end: time from which it is free.
    """

    def __init__(self) -> None:
        self.end = 0.0
        self._gaps: list[tuple[float, float]] = []  # free intervals before `end`, in order

    def reserve(self, after: float, seconds: float, now: float) -> tuple[float, float]:
        """Reserves the link for `seconds` from `after` on; drops free intervals before `now`."""
        gaps = self._gaps
        if gaps and gaps[0][1] <= now:
            del gaps[: bisect_right(gaps, now, key=_END)]
        for i in range(bisect_left(gaps, after + seconds, key=_END), len(gaps)):
            start, end = gaps[i]
            begin = max(after, start)
            if begin + seconds <= end:
                gaps[i : i + 1] = [(start, begin), (begin + seconds, end)]
                return begin, begin + seconds
        begin = max(after, self.end)
        if begin > self.end:
            gaps.append((self.end, begin))
        self.end = begin + seconds
        return begin, self.end


class SimulatedDisk:
    """Simulated clocks of the host's disk and of its copies to I/O buffers, one at a time."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device, self.clock, self._copies = device, 0.0, 0.0
        self._can_read_at = 0.0  # there is room for what is read ahead from then on
        self._read_ahead: deque[tuple[float, int]] = deque()  # loads: the host's clock, and bytes
        self._read_ahead_bytes = 0
        self._queued: deque[SimulatedArray] = deque()  # to be written, not begun
        self._writing: deque[tuple[float, SimulatedArray]] = deque()  # begun: the end of each
        self._pending_bytes = 0  # bytes of both

    def finish_writes(self) -> None:
        """Advances the clocks until all pending disk writes are done."""
        self._start_writes(math.inf)

    def read(self, entry: SimulatedArray) -> None:
        """Simulates the disk read of an entry; until it is written, it is in host memory."""
        device = self._device
        while not fits_byte_window(self._read_ahead_bytes, entry.nbytes, READ_AHEAD_BYTES):
            self._can_read_at, nbytes = self._read_ahead.popleft()
            self._read_ahead_bytes -= nbytes
        self._start_writes(max(self.clock, self._can_read_at))
        if not any(entry is a for a in (*self._queued, *(a for _, a in self._writing))):
            start = max(self.clock, self._can_read_at)
            self.clock = start + entry.nbytes / device.rates.disk_read
            self._record_span("read", start, entry)
            device.wait_until(self._copy_time(self.clock, entry))
        self._read_ahead.append((device.host, entry.nbytes))
        self._read_ahead_bytes += entry.nbytes

    def write(self, entry: SimulatedArray) -> None:
        """Queues a simulated disk write; the host waits while the queue is full."""
        self._start_writes(self._device.host)
        while not fits_byte_window(self._pending_bytes, entry.nbytes, WRITE_BEHIND_BYTES):
            if not self._writing:
                self._start_writes(self._queued[0].ready)
            self._device.wait_until(self._writing[0][0])
            self._start_writes(self._device.host)
        self._queued.append(entry)
        self._pending_bytes += entry.nbytes

    def _start_writes(self, time: float) -> None:
        """Starts the queued disk writes that are possible until `time`; drops finished ones."""
        while self._queued and self._queued[0].ready <= time:
            entry = self._queued.popleft()
            start = max(self.clock, self._copy_time(entry.ready, entry))
            self.clock = start + entry.nbytes / self._device.rates.disk_write
            self._record_span("write", start, entry)
            self._writing.append((self.clock, entry))
        while self._writing and self._writing[0][0] <= self._device.host:
            self._pending_bytes -= self._writing.popleft()[1].nbytes

    def _copy_time(self, ready: float, entry: SimulatedArray) -> float:
        """Returns the time at which an entry, available at `ready`, is copied in host memory."""
        rates = self._device.rates
        if rates.has_own_memory:
            ready = self._copies = max(self._copies, ready) + entry.nbytes / rates.host_copy
        return ready

    def _record_span(self, name: str, start_time: float, entry_array: SimulatedArray) -> None:
        device = self._device
        device.spans.append(
            StreamActivity("disk", name, device.part, start_time, self.clock, entry_array.nbytes)
        )


# ---- adapters of the executor --------------------------------------------------------------
class DrivenDevice(Protocol):
    """Protocol of a device without data that a schedule drives: simulated, or sleeping threads."""

    part: str
    has_own_memory: bool

    def create_array(self, nbytes: int, on_device: bool) -> Any: ...

    def run_segment(self, segment: Segment, arguments: Sequence[Any]) -> Sequence[Any]: ...

    def put_number(self, value: int, spec: Any) -> Any: ...

    def copy_array(self, array: Any) -> Any: ...

    def transfer_arrays(self, arrays: Sequence[Any], to: Sequence[Any]) -> Sequence[Any]: ...

    def read(self, entry: Any) -> None: ...

    def write(self, entry: Any) -> None: ...


class SimulatedEntries:
    """Remote-buffer entries without values; see `popxl._storage.buffer_storage.BufferStorage`."""

    def __init__(self, buffer: RemoteBuffer, nbytes: int, device: DrivenDevice) -> None:
        self._resident, self._device = buffer.resident_entries, device
        self._on_disk = frozenset(buffer.on_disk_entries)
        self._nbytes = nbytes
        self._arrays = {i: self._new_array(i) for i in self._resident}

    def _new_array(self, index: int) -> Any:
        return self._device.create_array(self._nbytes, index in self._resident)

    def needs_transfer(self, index: Index) -> bool:
        return self._device.has_own_memory and _first_replica(index) not in self._resident

    def load(self, index: Index, donate: bool = False, copies: bool = False) -> Any:
        array, where = self.load_source_and_sharding(_first_replica(index), donate)
        if self.needs_transfer(index):
            (array,) = self._device.transfer_arrays([array], [where])
            return array
        return self._device.copy_array(array) if copies else array

    def store(self, index: Index, value: Any, copies: bool = False) -> None:
        at = _first_replica(index)
        if self.needs_transfer(index):
            (value,) = self._device.transfer_arrays([value], [self.store_sharding(at)])
        self.commit_store(at, self._device.copy_array(value) if copies else value)

    def array(self, index: int) -> Any:
        return self.load_source_and_sharding(index, False)[0]

    def load_source_and_sharding(self, index: int, donate: bool) -> tuple[Any, str]:
        on_disk = index in self._on_disk
        array = (
            self._arrays.pop(index) if donate and index in self._arrays and not on_disk else None
        )
        if array is None:
            array = self._arrays.get(index) or self._new_array(index)
        if on_disk:
            self._device.read(array)
        return array, "device"

    def store_sharding(self, index: int) -> str:
        return "host"

    def commit_store(self, index: int, array: Any) -> None:
        self._arrays[index] = array
        if index in self._on_disk:
            self._device.write(array)


def _first_replica(index: Index) -> int:
    """Returns a buffer entry's index on the first replica, which represents all replicas."""
    return index[0] if isinstance(index, tuple) else index


def drive_device(schedule: Schedule, device: DrivenDevice, window: int) -> None:
    """Runs a schedule on a device without data."""
    steps = [step for routine in schedule.routines for step in routine.steps]
    sizes = {step.buffer: step.nbytes for step in steps if isinstance(step, Transfer)}
    entries = {buffer: SimulatedEntries(buffer, n, device) for buffer, n in sizes.items()}
    fetched = FetchedScalars()
    mover = PrefetchMover(
        lookahead_events(schedule, fetched.subscribe()), entries, device.transfer_arrays, window
    )

    def label_steps(steps: Steps) -> Steps:
        for step, at in steps:
            if isinstance(step, (Load, Store, Run)):
                device.part = at.region_label(step)
            yield step, at

    def fetch(array: Any) -> int:
        array.block_until_ready()
        return 0  # the value is unknown

    executor = ScheduleExecutor(
        device.run_segment,
        device.put_number,
        device.copy_array,
        mover,
        NoRunGlobals(),
        fetched,
        label_steps,
        fetch,
    )
    main = schedule.main
    inputs = [
        None if register is None else device.create_array(nbytes_of([main.specs[register]]), True)
        for register in main.inputs
    ]
    executor.run(main, inputs)
    mover.finish_run()


class NoneMapping(dict[Any, Any]):
    def __missing__(self, key: Any) -> None:
        return None


class NoRunGlobals(RunGlobals):
    """Stand-in for a run's streams and constants, which are always on the device."""

    def __init__(self) -> None:
        super().__init__(NoneMapping(), NoneMapping(), NoneMapping())
