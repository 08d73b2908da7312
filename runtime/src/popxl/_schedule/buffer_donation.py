"""Buffer donation: which compiled segments reuse their arguments' memory, and which need copies.

A segment donates an argument whose memory is dead (`liveness`) and belongs to the routine. Inputs
belong to the caller, except those that the graph changes or a loop carries: callers donate these,
and copy them first if they still need them. A loaded entry shares the memory of its buffer.

Callees are processed before their callers, once for all of them. A caller uses a callee's consumed
inputs, the memory of its outputs, and the buffers that it loads from and stores to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING

from popxl._ir.debug_flags import STEPWISE, is_debug_flag_set
from popxl._schedule.liveness import Liveness, MemoryRef
from popxl._schedule.schedule import (
    Branch,
    Load,
    Loop,
    Register,
    Routine,
    Run,
    Step,
    Store,
    routine_calls,
)

if TYPE_CHECKING:
    from popxl._schedule.segment import Segment
    from popxl.remote_buffer import RemoteBuffer


def donate(routine: Routine, donatable_inputs: Iterable[int]) -> None:
    """Sets in a routine's steps which arguments are donated to XLA and which are copied.

    Args:
        donatable_inputs: inputs that callers can be asked to donate.
    """
    _DonationPass(routine, frozenset(donatable_inputs)).run()


def has_exclusive_memory(routine: Routine, index: int, source: int | None = None) -> bool:
    """True if a routine's output shares memory with nothing but, possibly, its input `source`."""
    memory = routine.output_memory[index]
    private = all(kind == "own" or (kind, key) == ("input", source) for kind, key in memory)
    return private and memory.isdisjoint(routine.shared_memory)


class _DonationPass:
    """Decides the donations and copies of the steps of one routine (a graph's host steps).

    Attributes:
        donatable_inputs: inputs that callers can be asked to donate.
        consumed_memory: memory of the routine that was donated, or became that of an entry.
    """

    def __init__(self, routine: Routine, donatable_inputs: frozenset[int]) -> None:
        self.routine, self.donatable_inputs = routine, donatable_inputs
        self.liveness = Liveness(routine)
        self.consumed_memory: set[MemoryRef] = set()

    def run(self) -> None:
        routine = self.routine
        updating = _loads_of_updated_entries(routine)
        for i, step in enumerate(routine.steps):
            self._process_step(i, step, updating)
        routine.consumed_inputs = frozenset(
            i for kind, i in self.consumed_memory if kind == "input"
        )
        self._record_output_memory()
        _record_buffers(routine)
        self.liveness.record_dead_registers()

    def _is_donatable(self, register: Register) -> bool:
        return all(
            m not in self.consumed_memory
            and (m[0] == "own" or (m[0] == "input" and m[1] in self.donatable_inputs))
            for m in self.liveness.memory[register]
        )

    # ---- steps ----------------------------------------------------------------------------------
    def _process_step(self, index: int, step: Step, updating_loads: dict[Register, Load]) -> None:
        match step:
            case Load():
                self.liveness.set_memory(step.out, [("entry", step.out)])
            case Store():
                # The memory belongs to the entry from now on; other registers can only read it.
                step.copies = not self._is_donatable(step.value)
                if not step.copies:
                    self.consumed_memory |= self.liveness.memory[step.value]
            case Run():
                self._process_run(index, step, updating_loads)
                for register in step.outs:
                    self.liveness.set_memory(register, [("own", register)])
            case Loop():
                self._process_loop(index, step, updating_loads)
            case Branch():
                for k, out in enumerate(step.outs):
                    if out is not None:
                        memories = (self.liveness.call_output_memory(p, k) for p in step.branches)
                        self.liveness.set_memory(out, set().union(*memories))

    def _process_run(self, index: int, step: Run, updating_loads: dict[Register, Load]) -> None:
        segment, uses = step.segment, Counter(step.args)
        free_results = Counter((s.shape, s.dtype) for s in segment.result_specs)
        donated = []
        for i in () if is_debug_flag_set(STEPWISE) else _donation_order(segment):
            register = step.args[i]
            if i in segment.scalar_args:
                continue
            spec = self.routine.specs[register]
            kind = spec.shape, spec.dtype
            load = updating_loads.get(register)
            can_donate = load is not None or self._is_donatable(register)
            can_donate = can_donate and self.liveness.is_last_use(register, index, uses)
            if can_donate and free_results[kind]:
                free_results[kind] -= 1
                donated.append(i)
                if load is not None:
                    load.donates = True
                self.consumed_memory |= self.liveness.memory[register]
        segment.donated = tuple(sorted(donated))

    def _process_loop(self, index: int, step: Loop, updating_loads: dict[Register, Load]) -> None:
        body, routine = step.body, step.body.routine
        uses = Counter(step.reads())
        copies = set()
        for i in routine.consumed_inputs:
            register = body.args[i]
            load = updating_loads.get(register)
            can_donate = load is not None or self._is_donatable(register)
            if can_donate and self.liveness.is_last_use(register, index, uses):
                self.consumed_memory |= self.liveness.memory[register]
                if load is not None:
                    load.donates = True
            else:
                copies.add(i)
        body.copies = frozenset(copies)
        if step.count != 1:
            shared = {i for k, i in step.carried if not has_exclusive_memory(routine, k)}
            step.copies = frozenset(shared & routine.consumed_inputs)
        carried = {i: k for k, i in step.carried}
        for k, out in enumerate(body.outs):
            if out is not None:
                self.liveness.set_memory(out, self.liveness.call_output_memory(body, k, carried))
        body.donated = tuple(
            s for s in dict.fromkeys(body.args)
            if self.liveness.last_use[s] == index and s not in self.routine.constants
        )  # fmt: skip

    # ---- the end --------------------------------------------------------------------------------
    def _record_output_memory(self) -> None:
        """Records where a routine's outputs are stored, and which other values share that memory.

        Memory that the same outputs can be in is merged: nested branches would double it each time.
        """
        routine = self.routine
        outputs_of: dict[MemoryRef, list[int]] = {}
        for k, register in enumerate(routine.outputs):
            for m in self.liveness.memory.get(register, ()):
                outputs_of.setdefault(m, []).append(k)

        outside, numbers = dict[MemoryRef, MemoryRef](), dict[tuple[int, ...], int]()
        for m, outputs in outputs_of.items():
            kind = "entry" if m in self.consumed_memory else m[0]
            key = numbers.setdefault(tuple(outputs), len(numbers))
            outside[m] = m if kind == "input" else (kind, key)
        routine.output_memory = tuple(
            frozenset(outside[m] for m in self.liveness.memory.get(register, ()))
            for register in routine.outputs
        )
        counts = Counter(m for refs in routine.output_memory for m in refs)
        routine.shared_memory = frozenset(m for m, count in counts.items() if count > 1)
        routine.memory_last_use = self.liveness.memory_last_use()
        end, memory = len(routine.steps), self.liveness.memory
        routine.aliasing_outputs = {
            register: sorted({k for m in memory[register] for k in outputs_of.get(m, ())})
            for register, last_use in routine.memory_last_use.items()
            if last_use == end
        }


def _donation_order(segment: Segment) -> list[int]:
    """Returns argument indices in donation order: first those that the segment's nodes modify."""
    changed = {v.tensor for v in segment.results}
    return sorted(range(len(segment.args)), key=lambda i: segment.args[i].tensor not in changed)


# ---- entries ------------------------------------------------------------------------------------
def _loads_of_updated_entries(routine: Routine) -> dict[Register, Load]:
    """Returns, by result register, the loads whose entry is stored before other buffer uses."""
    loads: dict[Register, Load] = {}
    pending: dict[RemoteBuffer, Load] = {}
    for step in routine.steps:
        if isinstance(step, Load):
            pending[step.buffer] = step
        elif isinstance(step, Store):
            load = pending.pop(step.buffer, None)
            if load is not None and load.entry_index == step.entry_index:
                loads[load.out] = load
        for call_args in routine_calls(step):
            for buffer in call_args.routine.used_buffers:
                pending.pop(buffer, None)
    return loads


def mark_entry_copies(routines: Sequence[Routine]) -> None:
    """Marks loads and stores that must copy the remote-buffer entry instead of sharing its memory.

    Another load donates the entry while its value is used.

    Args:
        routines: callees first.
    """
    anywhere = set().union(*(r.donated_buffers for r in routines))
    returned: dict[Routine, list[tuple[int, Load | Store]]] = {}
    for routine in routines:
        returned[routine] = []
        donations: dict[RemoteBuffer, list[int]] = {}  # steps that donate entries, in order
        for i, step in enumerate(routine.steps):
            for buffer in _donated_buffers(step):
                donations.setdefault(buffer, []).append(i)
        for i, step in enumerate(routine.steps):
            for register, transfer in _entry_aliases(step, returned):
                if transfer.copies or transfer.buffer not in anywhere:
                    continue
                returned[routine] += [
                    (k, transfer) for k in routine.aliasing_outputs.get(register, ())
                ]
                later = donations.get(transfer.buffer, [])
                transfer.copies = bisect_right(later, i) < bisect_right(
                    later, routine.memory_last_use[register]
                )
    for _, transfer in returned[routines[-1]]:  # a later run may donate it
        transfer.copies = True


def _entry_aliases(
    step: Step, returned: Mapping[Routine, Sequence[tuple[int, Load | Store]]]
) -> list[tuple[Register, Load | Store]]:
    """Returns registers that share memory with a buffer entry after `step`, with its transfer.

    Args:
        returned: of the routines that `step` may call, outputs that do.
    """
    if isinstance(step, Load):
        return [] if step.donates else [(step.out, step)]
    if isinstance(step, Store):
        return [(step.value, step)]
    shared = []
    for call_args in routine_calls(step):
        outs = step.outs if isinstance(step, Branch) else call_args.outs
        for k, transfer in returned[call_args.routine]:
            register = outs[k]
            if isinstance(step, Loop) and step.count > 1:
                transfer.copies = True  # a later iteration may donate it, and is given it
            elif register is not None:
                shared.append((register, transfer))
    return shared


def _donated_buffers(step: Step) -> Set[RemoteBuffer]:
    if isinstance(step, Load) and step.donates:
        return {step.buffer}
    return frozenset().union(
        *(call_args.routine.donated_buffers for call_args in routine_calls(step))
    )


def _record_buffers(routine: Routine) -> None:
    """Records in a routine the remote buffers that it uses, and those whose entries it donates."""
    steps = routine.steps
    called = (call_args.routine.used_buffers for step in steps for call_args in routine_calls(step))
    direct = (step.buffer for step in steps if isinstance(step, (Load, Store)))
    routine.used_buffers = frozenset(direct).union(*called)
    routine.donated_buffers = frozenset().union(*map(_donated_buffers, steps))
