"""Iteration over a schedule's steps in execution order, with calls, loops and branches expanded.

The walk keeps the registers; its caller executes the steps: the executor with arrays, the
look-ahead with scalars. An observer is a generator between the two, which sees the registers before
and after each step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from popxl._schedule.schedule import (
    Branch,
    Compute,
    Loop,
    Register,
    Routine,
    Run,
    Schedule,
    Step,
    format_step,
    routine_calls,
)

if TYPE_CHECKING:
    from popxl._schedule.schedule import Index
    from popxl._schedule.segment import Segment


class Frame:
    """Call frame of a routine (host steps of a graph), with the values of its registers.

    Args:
        inputs: values of the routine's inputs; the list is emptied.
        rounding_offset: random roundings before it.
        part: label of the part of the program that its caller belongs to.

    Attributes:
        registers: the value in each register; None: it has none now.
    """

    __slots__ = ("part", "registers", "rounding_offset", "routine")

    def __init__(
        self, routine: Routine, inputs: list[Any], rounding_offset: int = 0, part: str = ""
    ) -> None:
        self.routine, self.rounding_offset, self.part = routine, rounding_offset, part
        self.registers: list[Any] = [None] * routine.num_registers
        for register, number in routine.constants.items():
            self.registers[register] = number
        self.set_registers(routine.inputs, inputs)
        inputs.clear()

    def set_registers(self, registers: Sequence[Register | None], values: Iterable[Any]) -> None:
        """Writes values to the frame's registers; a value whose register is None is dropped."""
        own_registers = self.registers
        for register, value in zip(registers, values, strict=True):
            if register is not None:
                own_registers[register] = value

    def take_outputs(self) -> list[Any]:
        """Returns the frame's output values and clears its registers."""
        outputs = [self.registers[register] for register in self.routine.outputs]
        self.registers.clear()
        return outputs

    def region_label(self, step: Step) -> str:
        """Returns the label of the program region that a step belongs to."""
        if isinstance(step, Run) and not step.part:
            return step.segment.region_label or self.part
        return step.part or self.part

    def format_step(self, step: Step) -> str:
        """Formats a schedule step, with the values of integers known to the host."""
        return format_step(
            step, {i: x for i, x in enumerate(self.registers) if isinstance(x, int | tuple)}
        )


Steps = Iterator[tuple[Step, Frame]]
Observer = Callable[[Steps], Steps]


class FetchedScalars:
    """Integers that a walk with arrays fetched, queued for each walk with scalars ahead of it."""

    def __init__(self) -> None:
        self._queues: list[deque[Any]] = []

    def subscribe(self) -> deque[Any]:
        """Returns a new queue of the integers fetched from the devices, for `lookahead_events`."""
        self._queues.append(deque())
        return self._queues[-1]

    def append(self, scalar: Index) -> None:
        """Appends an integer fetched from the devices to all queues."""
        for queue in self._queues:
            queue.append(scalar)


def compute_scalars(step: Compute, frame: Frame) -> None:
    """Executes a step that computes integers on the host."""
    registers = frame.registers
    for register, number in zip(
        step.outs, step.rule(*[registers[i] for i in step.ins]), strict=True
    ):
        registers[register] = number


def walk_steps(frame: Frame, copy: Callable[[Any], Any] = lambda value: value) -> Steps:
    """Yields the steps of a call frame and of the frames that it calls, in execution order.

    The caller does each step before it asks for the next one: the results are then in registers.
    Loops and branches come before the steps inside them; by then a branch's condition is one
    number.

    Args:
        copy: makes a value of its own memory.
    """
    stack = [_frame_steps(frame, copy)]
    while stack:
        for item in stack[-1]:
            if isinstance(item, Frame):
                stack.append(_frame_steps(item, copy))
                break
            yield item
        else:
            stack.pop()


def _frame_steps(frame: Frame, copy: Callable[[Any], Any]) -> Iterator[tuple[Step, Frame] | Frame]:
    """Yields the steps of a call frame, and the frames that it calls."""
    registers = frame.registers
    for step in frame.routine.steps:
        yield step, frame
        if isinstance(step, Loop):
            yield from _loop_frames(step, frame, copy)
        elif isinstance(step, Branch):
            call_args = step.branches[0 if registers[step.condition] else 1]
            inputs = [registers[register] for register in call_args.args]
            rounding_offset = frame.rounding_offset + step.rounding_offset
            inner = Frame(call_args.routine, inputs, rounding_offset, step.part or frame.part)
            yield inner
            frame.set_registers(step.outs, inner.take_outputs())
        for register in step.dead_registers:
            registers[register] = None


def _loop_frames(step: Loop, frame: Frame, copy: Callable[[Any], Any]) -> Iterator[Frame]:
    """Yields a call frame for each iteration of a loop step."""
    body, routine = step.body, step.body.routine
    current = [frame.registers[register] for register in body.args]
    for i in body.copies:
        current[i] = copy(current[i])
    for register in body.donated:
        frame.registers[register] = None
    (first, per_iteration), part = step.rounding_offset, step.part or frame.part
    outs: list[Any] = []
    carried_inputs = {i for _, i in step.carried}
    for iteration in range(step.count):
        inputs = list(current)
        if iteration == step.count - 1:
            current.clear()
        else:
            for i in routine.consumed_inputs:
                if i in carried_inputs:
                    current[i] = None
                else:  # the next iteration is given the same
                    inputs[i] = copy(inputs[i])
        rounding_offset = frame.rounding_offset + first + iteration * per_iteration
        inner = Frame(routine, inputs, rounding_offset, part)
        yield inner
        outs = inner.take_outputs()
        if iteration < step.count - 1:
            for k, i in step.carried:
                current[i] = outs[k]
            for i in step.copies:
                current[i] = copy(current[i])
            outs.clear()
    frame.set_registers(body.outs, outs)


def routines_by_part(
    main: Routine, should_skip: Callable[[Step], bool] = lambda step: False
) -> Iterator[tuple[Routine, str]]:
    """Yields all routines, callees first, once for each labelled region that calls them.

    Calls by `should_skip` steps are ignored.
    """

    def callees_of(routine: Routine, part: str) -> Iterator[tuple[Routine, str]]:
        for step in routine.steps:
            for call_args in () if should_skip(step) else routine_calls(step):
                yield call_args.routine, step.part or part

    seen = {(main, "")}
    stack = [((main, ""), callees_of(main, ""))]
    while stack:
        current, callees = stack[-1]
        for callee in callees:
            if callee not in seen:
                seen.add(callee)
                stack.append((callee, callees_of(*callee)))
                break
        else:
            stack.pop()
            yield current


def count_segment_runs(schedule: Schedule) -> Counter[Segment]:
    """Returns how often a run executes each segment; of two branches, the second one runs."""
    calls = Counter({schedule.main: 1})
    runs: Counter[Segment] = Counter()
    for routine in reversed(schedule.routines):  # callers first
        for step in routine.steps:
            if isinstance(step, Run):
                runs[step.segment] += calls[routine]
            times = step.count if isinstance(step, Loop) else 1
            for call_args in routine_calls(step)[-1:]:
                calls[call_args.routine] += times * calls[routine]
    return runs
