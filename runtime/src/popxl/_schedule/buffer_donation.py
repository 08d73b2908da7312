"""Buffer donation: which segments reuse the memory of their arguments, and where copies are needed.

Values never change, so this follows from registers alone. A register's value is in memory of its
own, in that of an input of the routine, or in that of an entry of a remote buffer; after a branch,
or a loop whose outputs change places, in one of several. Memory is *dead* at a step if no register
that may be in it is used after it. A segment donates an argument whose memory is dead and the
routine's. Inputs are the caller's, except those that change or are carried: callers donate these,
and copy what they need themselves. What is loaded from an entry borrows its memory.

A routine is decided once for all its callers, before them. Of a callee a caller knows what it
consumes, in which memory each output may be, and what it loads and stores; of its callers a routine
knows nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from popxl._ir.debug_flags import STEPWISE, is_on
from popxl._schedule.schedule import (
    Branch,
    CallArgs,
    Load,
    Loop,
    Register,
    Routine,
    Run,
    Step,
    Store,
    calls,
)

if TYPE_CHECKING:
    from popxl._schedule.segment import Segment
    from popxl.remote_buffer import RemoteBuffer

MemoryRef = tuple[str, Any]  # "own", "input" (with its index) or "entry", and what tells them apart


def donate(routine: Routine, donatable_inputs: Iterable[int]) -> None:
    """Decides donations and copies of all steps of `routine`, in place.

    Args:
        donatable_inputs: inputs that callers may be asked to donate.
    """
    _DonationPass(routine, frozenset(donatable_inputs)).run()


def is_exclusive(routine: Routine, index: int, source: int | None = None) -> bool:
    """True if an output shares its memory with nothing but, possibly, input `source` of the
    caller."""
    memory = routine.output_memory[index]
    private = all(kind == "own" or (kind, key) == ("input", source) for kind, key in memory)
    return private and memory.isdisjoint(routine.shared_memory)


@dataclass
class _DonationPass:
    """Donation pass over one routine.

    Attributes:
        memory: where the value of a register may be.
        last_users: of the registers that may be in it, the two that are used last, the last one
            first.
        consumed_memory: memory of the routine's that was donated, or that an entry has from now on.
    """

    routine: Routine
    donatable_inputs: frozenset[int]
    memory: dict[Register, frozenset[MemoryRef]] = field(default_factory=dict)
    last_users: dict[MemoryRef, list[Register]] = field(default_factory=dict)
    last_use: dict[Register, int] = field(default_factory=dict)
    consumed_memory: set[MemoryRef] = field(default_factory=set)

    def run(self) -> None:
        routine = self.routine
        for i, step in enumerate(routine.steps):
            self.last_use.update(dict.fromkeys(step.reads(), i))
        self.last_use.update(dict.fromkeys(routine.outputs, len(routine.steps)))
        for i, register in enumerate(routine.inputs):
            self._set_memory(register, [("input", i)])
        updating = _updating_loads(routine)
        for i, step in enumerate(routine.steps):
            self._step(i, step, updating)
        routine.consumed_inputs = frozenset(
            i for kind, i in self.consumed_memory if kind == "input"
        )
        self._record_output_memory()
        _record_buffers(routine)
        self._record_dead_registers()

    def _set_memory(self, register: Register, memory: Iterable[MemoryRef]) -> None:
        if register in self.routine.specs:
            self.memory[register] = frozenset(memory)
            for m in self.memory[register]:
                registers = [*self.last_users.get(m, ()), register]
                self.last_users[m] = sorted(registers, key=self._last_use, reverse=True)[:2]

    def _last_use(self, register: Register) -> int:
        return self.last_use.get(register, -1)

    # ---- whose memory, and until when -----------------------------------------------------------
    def _is_donatable(self, register: Register) -> bool:
        return all(
            m not in self.consumed_memory
            and (m[0] == "own" or (m[0] == "input" and m[1] in self.donatable_inputs))
            for m in self.memory[register]
        )

    def _is_dead(self, register: Register, index: int, uses: Counter[Register]) -> bool:
        """Whether step `index` is the last to use the memory, and uses it once."""
        return uses[register] == 1 and self.last_use[register] == index and not any(
            other != register and self._last_use(other) >= index
            for m in self.memory[register]
            for other in self.last_users[m]
        )  # fmt: skip

    # ---- steps ----------------------------------------------------------------------------------
    def _step(self, index: int, step: Step, updating: dict[Register, Load]) -> None:
        match step:
            case Load():
                self._set_memory(step.out, [("entry", step.out)])
            case Store():
                # The entry has the memory from now on; others may only read it.
                step.copies = not self._is_donatable(step.value)
                if not step.copies:
                    self.consumed_memory |= self.memory[step.value]
            case Run():
                self._run(index, step, updating)
                for register in step.outs:
                    self._set_memory(register, [("own", register)])
            case Loop():
                self._loop(index, step, updating)
            case Branch():
                for k, out in enumerate(step.outs):
                    if out is not None:
                        memories = (self._output_memory_of(p, k) for p in step.branches)
                        self._set_memory(out, set().union(*memories))

    def _run(self, index: int, step: Run, updating: dict[Register, Load]) -> None:
        segment, uses = step.segment, Counter(step.args)
        free_results = Counter((s.shape, s.dtype) for s in segment.result_specs)
        donated = []
        for i in () if is_on(STEPWISE) else _changed_first(segment):
            register = step.args[i]
            if i in segment.scalar_args:
                continue
            spec = self.routine.specs[register]
            kind = spec.shape, spec.dtype
            load = updating.get(register)
            can_donate = (load is not None or self._is_donatable(register)) and self._is_dead(
                register, index, uses
            )
            if can_donate and free_results[kind]:
                free_results[kind] -= 1
                donated.append(i)
                if load is not None:
                    load.donates = True
                self.consumed_memory |= self.memory[register]
        segment.donated = tuple(sorted(donated))

    def _loop(self, index: int, step: Loop, updating: dict[Register, Load]) -> None:
        body, routine = step.body, step.body.routine
        uses = Counter(step.reads())
        copies = set()
        for i in routine.consumed_inputs:
            register = body.args[i]
            load = updating.get(register)
            can_donate = load is not None or self._is_donatable(register)
            if can_donate and self._is_dead(register, index, uses):
                self.consumed_memory |= self.memory[register]
                if load is not None:
                    load.donates = True
            else:
                copies.add(i)
        body.copies = frozenset(copies)
        if step.count != 1:
            shared = {i for k, i in step.carried if not is_exclusive(routine, k)}
            step.copies = frozenset(shared & routine.consumed_inputs)
        carried = {i: k for k, i in step.carried}
        for k, out in enumerate(body.outs):
            if out is not None:
                self._set_memory(out, self._output_memory_of(body, k, carried))
        body.donated = tuple(
            s for s in dict.fromkeys(body.args)
            if self.last_use[s] == index and s not in self.routine.constants
        )  # fmt: skip

    def _output_memory_of(
        self, call_args: CallArgs, output: int, carried: Mapping[int, int] = MappingProxyType({})
    ) -> set[MemoryRef]:
        """Returns the memory that an output of a called routine can be in.

        Args:
            carried: for inputs of a loop, the output that they are in the next iteration.
        """
        memory: set[MemoryRef] = set()
        worklist, seen = [output], set[int]()
        while worklist:
            k = worklist.pop()
            seen.add(k)
            for kind, key in call_args.routine.output_memory[k]:
                if kind != "input":
                    memory.add((kind, (id(call_args), kind, key)))
                    continue
                memory |= self.memory.get(call_args.args[key], frozenset())
                if key in carried and carried[key] not in seen:
                    worklist.append(carried[key])
        return memory

    # ---- the end --------------------------------------------------------------------------------
    def _record_output_memory(self) -> None:
        """Records the memory of outputs, its last use and its aliases in the routine.

        What no output tells apart is one memory: branches in branches would double it each time.
        """
        routine = self.routine
        outputs_of: dict[MemoryRef, list[int]] = {}
        for k, register in enumerate(routine.outputs):
            for m in self.memory.get(register, ()):
                outputs_of.setdefault(m, []).append(k)

        outside, numbers = dict[MemoryRef, MemoryRef](), dict[tuple[int, ...], int]()
        for m, outputs in outputs_of.items():
            kind = "entry" if m in self.consumed_memory else m[0]
            key = numbers.setdefault(tuple(outputs), len(numbers))
            outside[m] = m if kind == "input" else (kind, key)
        routine.output_memory = tuple(
            frozenset(outside[m] for m in self.memory.get(register, ()))
            for register in routine.outputs
        )
        counts = Counter(m for memory in routine.output_memory for m in memory)
        routine.shared_memory = frozenset(m for m, count in counts.items() if count > 1)
        routine.memory_last_use = {
            register: max(map(self._last_use, [register, *(self.last_users[m][0] for m in memory)]))
            for register, memory in self.memory.items()
        }
        end = len(routine.steps)
        routine.aliasing_outputs = {
            register: sorted({k for m in self.memory[register] for k in outputs_of.get(m, ())})
            for register, last_use in routine.memory_last_use.items()
            if last_use == end
        }

    def _record_dead_registers(self) -> None:
        """Records in each step the registers that are dead after it."""
        constants = set(self.routine.constants)
        for i, step in enumerate(self.routine.steps):
            donated = set(step.body.donated) if isinstance(step, Loop) else set()
            registers: Iterable[Register] = dict.fromkeys([*step.reads(), *step.writes()])
            step.dead_registers = tuple(
                s for s in registers
                if self.last_use.get(s, i) == i and s not in donated and s not in constants
            )  # fmt: skip


def _changed_first(segment: Segment) -> list[int]:
    """Returns the arguments in donation order: those of tensors that the segment changes come
    first."""
    changed = {v.tensor for v in segment.results}
    return sorted(range(len(segment.args)), key=lambda i: segment.args[i].tensor not in changed)


# ---- entries ------------------------------------------------------------------------------------
def _updating_loads(routine: Routine) -> dict[Register, Load]:
    """Returns, by register, the loads whose entry is stored to before the buffer is used
    otherwise."""
    loads: dict[Register, Load] = {}
    pending: dict[RemoteBuffer, Load] = {}
    for step in routine.steps:
        if isinstance(step, Load):
            pending[step.buffer] = step
        elif isinstance(step, Store):
            load = pending.pop(step.buffer, None)
            if load is not None and load.entry_index == step.entry_index:
                loads[load.out] = load
        for call_args in calls(step):
            for buffer in call_args.routine.used_buffers:
                pending.pop(buffer, None)
    return loads


def copy_shared_entries(routines: Sequence[Routine]) -> None:
    """Marks loads and stores that must copy: another load donates the entry while its value is
    used.

    Args:
        routines: those that others call come first.
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
    """Returns registers that share memory with an entry after `step`, with the load or store.

    Args:
        returned: of the routines that `step` may call, outputs that do.
    """
    if isinstance(step, Load):
        return [] if step.donates else [(step.out, step)]
    if isinstance(step, Store):
        return [(step.value, step)]
    shared = []
    for call_args in calls(step):
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
    return frozenset().union(*(call_args.routine.donated_buffers for call_args in calls(step)))


def _record_buffers(routine: Routine) -> None:
    """Records in a routine the buffers that it uses, and those whose entries it donates."""
    steps = routine.steps
    called = (call_args.routine.used_buffers for step in steps for call_args in calls(step))
    direct = (step.buffer for step in steps if isinstance(step, (Load, Store)))
    routine.used_buffers = frozenset(direct).union(*called)
    routine.donated_buffers = frozenset().union(*map(_donated_buffers, steps))
