"""The schedule of a program as data: routines of host steps; `print(session.schedule)` shows it.

A program becomes a `Routine` for its main graph, and one for each graph with host steps. Steps read
and write numbered registers, which hold arrays on the devices or scalars of the host. Each register
is written once in a frame of its routine; a tensor that is changed in place moves to another
register.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from popxl._analysis.functionalization import FunctionalGraph
    from popxl._schedule.index_arithmetic import Rule
    from popxl._schedule.segment import Segment
    from popxl.remote_buffer import RemoteBuffer
    from popxl.tensor import TensorSpec

Register = int

Index = int | tuple[int, ...]  # of an entry; one for each replica where they differ


@dataclass(eq=False, kw_only=True)
class Step:
    """One step of the host in a schedule.

    Attributes:
        dead_registers: registers whose value nothing needs after this step, and that it does not
            give away.
        part: label of the part of the program it belongs to (see `popxl.plan.part`).
        location: `file:line` of the user's code; of a run, that of its first op.
    """

    dead_registers: tuple[Register, ...] = ()
    part: str = ""
    location: str = ""

    def reads(self) -> Iterator[Register]:
        """Yields the virtual registers that the step reads."""
        yield from ()

    def writes(self) -> Iterator[Register]:
        """Yields the virtual registers that the step writes."""
        yield from ()


@dataclass(eq=False, kw_only=True)
class Transfer(Step):
    """A load or store of entry `entry_index` of a remote buffer."""

    buffer: RemoteBuffer
    entry_index: Register

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the transferred remote-buffer entry on one replica."""
        return math.prod(self.buffer.tensor_shape) * self.buffer.tensor_dtype.itemsize


@dataclass(eq=False, kw_only=True)
class Load(Transfer):
    """Step that loads entry `entry_index` of a remote buffer to the device.

    Attributes:
        donates: the entry donates its memory: a later step stores to it before anything else
            looks at the buffer, and a run in between donates it.
        copies: the value must not share memory with the entry.
    """

    out: Register
    donates: bool = False
    copies: bool = False

    def reads(self) -> Iterator[Register]:
        yield self.entry_index

    def writes(self) -> Iterator[Register]:
        yield self.out


@dataclass(eq=False, kw_only=True)
class Store(Transfer):
    """Step that stores an array to entry `entry_index` of a remote buffer.

    Attributes:
        copies: the entry must not share memory with the array, which is still used.
    """

    value: Register
    copies: bool = False

    def reads(self) -> Iterator[Register]:
        yield from (self.value, self.entry_index)


@dataclass(eq=False, kw_only=True)
class Compute(Step):
    """Step that computes integers on the host, such as loop counters and entry indices."""

    name: str
    rule: Rule
    ins: tuple[Register, ...]
    outs: tuple[Register, ...]

    def reads(self) -> Iterator[Register]:
        yield from self.ins

    def writes(self) -> Iterator[Register]:
        yield from self.outs


@dataclass(eq=False, kw_only=True)
class Fetch(Step):
    """Step that waits for an integer scalar from the devices."""

    value: Register
    out: Register

    def reads(self) -> Iterator[Register]:
        yield self.value

    def writes(self) -> Iterator[Register]:
        yield self.out


@dataclass(eq=False, kw_only=True)
class Run(Step):
    """Step that runs a segment (ops compiled together) on the devices.

    Attributes:
        args: for each argument of the segment its register.
        outs: for each result of the segment its register.
        rounding_offset: random roundings of the routine's frame before this step.
    """

    segment: Segment
    args: tuple[Register, ...]
    outs: tuple[Register, ...] = ()
    rounding_offset: int = 0

    def reads(self) -> Iterator[Register]:
        yield from self.args

    def writes(self) -> Iterator[Register]:
        yield from self.outs


@dataclass(eq=False, kw_only=True)
class CallArgs:
    """Argument and result registers of a routine call, with the called routine.

    Attributes:
        args: register for each input of the routine.
        outs: register for each output; None: nobody wants it, or it is what the caller passed.
        copies: inputs that get a copy, because the routine donates them and the caller needs them
            afterwards.
        donated: registers that the caller donates: it needs them no more.
    """

    routine: Routine
    args: tuple[Register, ...]
    outs: tuple[Register | None, ...] = ()
    copies: frozenset[int] = frozenset()
    donated: tuple[Register, ...] = ()

    def reads(self) -> Iterator[Register]:
        yield from self.args

    def writes(self) -> Iterator[Register]:
        yield from (out for out in self.outs if out is not None)


@dataclass(eq=False, kw_only=True)
class Loop(Step):
    """Step that runs a routine `count` times; a call is a loop of one iteration.

    Attributes:
        carried: pairs of an output and the input that it is in the next iteration.
        copies: inputs of the next iteration that get a copy (see `CallArgs.copies`).
        rounding_offset: random roundings before this step, and in each iteration.
    """

    body: CallArgs
    count: int = 1
    carried: tuple[tuple[int, int], ...] = ()
    copies: frozenset[int] = frozenset()
    rounding_offset: tuple[int, int] = (0, 0)

    def reads(self) -> Iterator[Register]:
        yield from self.body.reads()

    def writes(self) -> Iterator[Register]:
        yield from self.body.writes()


@dataclass(eq=False, kw_only=True)
class Branch(Step):
    """Step that runs one of two routines.

    Attributes:
        condition: register of a number; not 0: the first.
        outs: register for each output of the branches; None: both pass on what the caller passed.
    """

    condition: Register
    branches: tuple[CallArgs, ...]
    outs: tuple[Register | None, ...]
    rounding_offset: int = 0

    def reads(self) -> Iterator[Register]:
        yield self.condition
        for branch in self.branches:
            yield from branch.reads()

    def writes(self) -> Iterator[Register]:
        yield from (out for out in self.outs if out is not None)


def routine_calls(step: Step) -> tuple[CallArgs, ...]:
    """Returns the routine calls of a step."""
    if isinstance(step, Loop):
        return (step.body,)
    return step.branches if isinstance(step, Branch) else ()


@dataclass(eq=False)
class Routine:
    """The host steps of one graph, with their registers.

    Attributes:
        title: for people.
        inputs: register of each input.
        outputs: register of each output; that of an input, if it is passed on.
        steps: in order.
        constants: values of registers that are known before anything runs: numbers of constants.
        specs: specs of array registers on one replica; scalar registers have none.
        num_registers: number of registers.
        consumed_inputs: inputs that the routine donates, or stores without a copy.
        output_memory: for each output the memory that it may be in (see `liveness`).
        shared_memory: memory that several outputs may be in.
        memory_last_use: for each register of an array the last step that may use its memory; an
            output's is used after all steps.
        aliasing_outputs: for each register of an array the outputs that may be in its memory, if
            there are any.
        used_buffers: buffers that it loads from or stores to, with all that it calls.
        donated_buffers: buffers whose entries it donates, with all that it calls.
    """

    title: str
    inputs: tuple[Register, ...]
    outputs: tuple[Register, ...]
    steps: list[Step]
    constants: dict[Register, int]
    specs: dict[Register, TensorSpec]
    num_registers: int
    consumed_inputs: frozenset[int] = frozenset()
    output_memory: tuple[frozenset[Any], ...] = ()
    shared_memory: frozenset[Any] = frozenset()
    memory_last_use: Mapping[Register, int] = field(default_factory=dict)
    aliasing_outputs: Mapping[Register, Sequence[int]] = field(default_factory=dict)
    used_buffers: frozenset[RemoteBuffer] = frozenset()
    donated_buffers: frozenset[RemoteBuffer] = frozenset()


@dataclass(eq=False)
class Schedule:
    """The routines of a program: the steps of the host in a run.

    Attributes:
        graph: the main graph in functional form: its inputs are the variables on the device.
        main: its routine.
        routines: all of them, callees first.
        segments: what the devices run.
        window: bytes on one replica of loads that are dispatched before the runs that precede them,
            and of stores on their way; None: host and device share their memory.
        preview: says of runs which loads are dispatched before them; for people.
    """

    graph: FunctionalGraph
    main: Routine
    routines: Sequence[Routine]
    segments: Sequence[Segment]
    window: int | None = None
    preview: Callable[[Schedule], Mapping[Run, str]] = lambda _: {}

    def __str__(self) -> str:
        prefetched = self.preview(self)
        routines = ["\n".join(_format_routine(r, prefetched)) for r in reversed(self.routines)]
        return "\n\n".join([*_format_window(self.window), *routines])


# ---- text ---------------------------------------------------------------------------------------
def _format_window(window: int | None) -> Iterator[str]:
    if window is not None:
        yield f"loads are dispatched ahead of the runs before them, within {window:,} bytes"


def _format_routine(routine: Routine, prefetched: Mapping[Run, str]) -> Iterator[str]:
    yield f"routine {routine.title}:"
    part = ""
    for step in routine.steps:
        if step.part != part:
            part = step.part
            yield f"  # {part or 'no part'}"
        if isinstance(step, Run) and step in prefetched:
            yield f"  # {prefetched[step]}"
        yield f"  {format_step(step, routine.constants)}{_format_dead_registers(step)}"


def _format_dead_registers(step: Step) -> str:
    return f"; free {_format_registers(step.dead_registers)}" if step.dead_registers else ""


def _format_registers(registers: Any) -> str:
    return ", ".join(f"%{s}" for s in registers if s is not None)


def format_step(step: Step, scalars: Mapping[Register, Index]) -> str:
    """Formats a schedule step; known scalars are printed as numbers instead of registers."""

    def format_register(register: Register) -> str:
        return str(scalars[register]) if register in scalars else f"%{register}"

    def format_entry(step: Transfer) -> str:
        return f"buffer {step.buffer.remote_buffer_id}[{format_register(step.entry_index)}]"

    match step:
        case Load():
            suffix = " donating its memory" if step.donates else ""
            return f"%{step.out} = load {format_entry(step)}{suffix}"
        case Store():
            return f"store %{step.value} in {format_entry(step)}"
        case Compute():
            ins = ", ".join(map(format_register, step.ins))
            outs = f"{_format_registers(step.outs)} = " if step.outs else ""
            return f"{outs}{step.name}({ins}) on the host"
        case Fetch():
            return f"%{step.out} = wait for %{step.value}"
        case Run():
            outs = f"{_format_registers(step.outs)} = " if step.outs else ""
            donated = [step.args[i] for i in step.segment.donated]
            donated_buffers = f" donating {_format_registers(donated)}" if donated else ""
            return f"{outs}run {step.segment.name}({_format_registers(step.args)}){donated_buffers}"
        case Loop():
            outs = _format_registers(step.body.outs)
            call_text = "call" if step.count == 1 else f"{step.count} times"
            lhs = f"{outs} = " if outs else ""
            return (
                f"{lhs}{call_text} {step.body.routine.title}({_format_registers(step.body.args)})"
            )
        case Branch():
            runs = (f"{b.routine.title}({_format_registers(b.args)})" for b in step.branches)
            outs = _format_registers(step.outs)
            chosen = f"if {format_register(step.condition)}: {' else: '.join(runs)}"
            return f"{outs} = {chosen}" if outs else chosen
    raise AssertionError(step)
