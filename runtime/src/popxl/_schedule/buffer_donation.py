"""Which memory may be used again: last uses, donations, and the copies that these make necessary.

Values never change, so this follows from slots alone. A slot's value is in memory of its own, in
that of an input of the routine, or in that of an entry of a remote buffer; after a branch, or a
loop whose outputs change places, in one of several. Memory is *dead* at a step if no slot that may
be in it is used after it. A segment donates an argument whose memory is dead and the routine's.
Inputs are the caller's, except those that change or are carried: callers donate these, and copy
what they need themselves. What is loaded from an entry borrows its memory.

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
    Load,
    Loop,
    Passed,
    Routine,
    Run,
    Slot,
    Step,
    Store,
    calls,
)

if TYPE_CHECKING:
    from popxl._schedule.segment import Segment
    from popxl.remote_buffer import RemoteBuffer

Memory = tuple[str, Any]  # "own", "input" (with its index) or "entry", and what tells them apart


def donate(routine: Routine, candidates: Iterable[int]) -> None:
    """Decide for all steps of `routine`, in place.

    Args:
        candidates: inputs that callers may be asked to donate.
    """
    _Donor(routine, frozenset(candidates)).decide()


def is_exclusive(routine: Routine, index: int, source: int | None = None) -> bool:
    """Whether nobody else has the memory of an output (but the caller, as input `source`)."""
    mine = routine.memory[index]
    private = all(kind == "own" or (kind, which) == ("input", source) for kind, which in mine)
    return private and mine.isdisjoint(routine.shared)


@dataclass
class _Donor:
    """
    Attributes:
        memory: where the value of a slot may be.
        latest: of the slots that may be in it, the two that are used last, the last one first.
        gone: memory of the routine's that was donated, or that an entry has from now on.
    """

    routine: Routine
    candidates: frozenset[int]
    memory: dict[Slot, frozenset[Memory]] = field(default_factory=dict)
    latest: dict[Memory, list[Slot]] = field(default_factory=dict)
    last_use: dict[Slot, int] = field(default_factory=dict)
    gone: set[Memory] = field(default_factory=set)

    def decide(self) -> None:
        routine = self.routine
        for i, step in enumerate(routine.steps):
            self.last_use.update(dict.fromkeys(step.reads(), i))
        self.last_use.update(dict.fromkeys(routine.outputs, len(routine.steps)))
        for i, slot in enumerate(routine.inputs):
            self._place(slot, [("input", i)])
        updating = _updating_loads(routine)
        for i, step in enumerate(routine.steps):
            self._step(i, step, updating)
        routine.consumed = frozenset(i for kind, i in self.gone if kind == "input")
        self._share()
        _note_buffers(routine)
        self._free()

    def _place(self, slot: Slot, memory: Iterable[Memory]) -> None:
        if slot in self.routine.specs:
            self.memory[slot] = frozenset(memory)
            for m in self.memory[slot]:
                slots = [*self.latest.get(m, ()), slot]
                self.latest[m] = sorted(slots, key=self._used, reverse=True)[:2]

    def _used(self, slot: Slot) -> int:
        return self.last_use.get(slot, -1)

    # ---- whose memory, and until when -----------------------------------------------------------
    def _is_ours(self, slot: Slot) -> bool:
        return all(
            m not in self.gone and (m[0] == "own" or (m[0] == "input" and m[1] in self.candidates))
            for m in self.memory[slot]
        )

    def _is_dead(self, slot: Slot, index: int, uses: Counter[Slot]) -> bool:
        """Whether step `index` is the last to use the memory, and uses it once."""
        return uses[slot] == 1 and self.last_use[slot] == index and not any(
            other != slot and self._used(other) >= index
            for m in self.memory[slot]
            for other in self.latest[m]
        )  # fmt: skip

    # ---- steps ----------------------------------------------------------------------------------
    def _step(self, index: int, step: Step, updating: dict[Slot, Load]) -> None:
        match step:
            case Load():
                self._place(step.out, [("entry", step.out)])
            case Store():
                # The entry has the memory from now on; others may only read it.
                step.copies = not self._is_ours(step.value)
                if not step.copies:
                    self.gone |= self.memory[step.value]
            case Run():
                self._run(index, step, updating)
                for slot in step.outs:
                    self._place(slot, [("own", slot)])
            case Loop():
                self._loop(index, step, updating)
            case Branch():
                for k, out in enumerate(step.outs):
                    if out is not None:
                        memories = (self._returned(p, k) for p in step.branches)
                        self._place(out, set().union(*memories))

    def _run(self, index: int, step: Run, updating: dict[Slot, Load]) -> None:
        segment, uses = step.segment, Counter(step.args)
        room = Counter((s.shape, s.dtype) for s in segment.result_specs)
        donated = []
        for i in () if is_on(STEPWISE) else _changed_first(segment):
            slot = step.args[i]
            if i in segment.numbers:
                continue
            spec = self.routine.specs[slot]
            kind = spec.shape, spec.dtype
            load = updating.get(slot)
            may = (load is not None or self._is_ours(slot)) and self._is_dead(slot, index, uses)
            if may and room[kind]:
                room[kind] -= 1
                donated.append(i)
                if load is not None:
                    load.donates = True
                self.gone |= self.memory[slot]
        segment.donated = tuple(sorted(donated))

    def _loop(self, index: int, step: Loop, updating: dict[Slot, Load]) -> None:
        body, routine = step.body, step.body.routine
        uses = Counter(step.reads())
        copies = set()
        for i in routine.consumed:
            slot = body.args[i]
            load = updating.get(slot)
            may = load is not None or self._is_ours(slot)
            if may and self._is_dead(slot, index, uses):
                self.gone |= self.memory[slot]
                if load is not None:
                    load.donates = True
            else:
                copies.add(i)
        body.copies = frozenset(copies)
        if step.count != 1:
            shared = {i for k, i in step.carried if not is_exclusive(routine, k)}
            step.copies = frozenset(shared & routine.consumed)
        carried = {i: k for k, i in step.carried}
        for k, out in enumerate(body.outs):
            if out is not None:
                self._place(out, self._returned(body, k, carried))
        body.donated = tuple(
            s for s in dict.fromkeys(body.args)
            if self.last_use[s] == index and s not in self.routine.start
        )  # fmt: skip

    def _returned(
        self, passed: Passed, output: int, carried: Mapping[int, int] = MappingProxyType({})
    ) -> set[Memory]:
        """Where an output of a routine that is called may be.

        Args:
            carried: for inputs of a loop, the output that they are in the next iteration.
        """
        memory: set[Memory] = set()
        waiting, seen = [output], set[int]()
        while waiting:
            k = waiting.pop()
            seen.add(k)
            for kind, which in passed.routine.memory[k]:
                if kind != "input":
                    memory.add((kind, (id(passed), kind, which)))
                    continue
                memory |= self.memory.get(passed.args[which], frozenset())
                if which in carried and carried[which] not in seen:
                    waiting.append(carried[which])
        return memory

    # ---- the end --------------------------------------------------------------------------------
    def _share(self) -> None:
        """Say in which memory outputs are, and until when and as which outputs memory is used.

        What no output tells apart is one memory: branches in branches would double it each time.
        """
        routine = self.routine
        holders: dict[Memory, list[int]] = {}
        for k, slot in enumerate(routine.outputs):
            for m in self.memory.get(slot, ()):
                holders.setdefault(m, []).append(k)

        outside, numbers = dict[Memory, Memory](), dict[tuple[int, ...], int]()
        for m, outputs in holders.items():
            kind = "entry" if m in self.gone else m[0]
            which = numbers.setdefault(tuple(outputs), len(numbers))
            outside[m] = m if kind == "input" else (kind, which)
        routine.memory = tuple(
            frozenset(outside[m] for m in self.memory.get(slot, ())) for slot in routine.outputs
        )
        counts = Counter(m for memory in routine.memory for m in memory)
        routine.shared = frozenset(m for m, count in counts.items() if count > 1)
        routine.until = {s: max(map(self._used, [s, *(self.latest[m][0] for m in memory)]))
                         for s, memory in self.memory.items()}  # fmt: skip
        end = len(routine.steps)
        routine.kept = {s: sorted({k for m in self.memory[s] for k in holders.get(m, ())})
                        for s, until in routine.until.items() if until == end}  # fmt: skip

    def _free(self) -> None:
        """Let each step free what is not needed after it."""
        known = set(self.routine.start)
        for i, step in enumerate(self.routine.steps):
            donated = set(step.body.donated) if isinstance(step, Loop) else set()
            slots: Iterable[Slot] = dict.fromkeys([*step.reads(), *step.writes()])
            step.last = tuple(
                s for s in slots
                if self.last_use.get(s, i) == i and s not in donated and s not in known
            )  # fmt: skip


def _changed_first(segment: Segment) -> list[int]:
    """Arguments in the order of donation: first those of tensors that the segment changes."""
    changed = {v.tensor for v in segment.results}
    return sorted(range(len(segment.args)), key=lambda i: segment.args[i].tensor not in changed)


# ---- entries ------------------------------------------------------------------------------------
def _updating_loads(routine: Routine) -> dict[Slot, Load]:
    """Loads whose entry is stored to before anything else touches the buffer, by their slot."""
    loads: dict[Slot, Load] = {}
    pending: dict[RemoteBuffer, Load] = {}
    for step in routine.steps:
        if isinstance(step, Load):
            pending[step.buffer] = step
        elif isinstance(step, Store):
            load = pending.pop(step.buffer, None)
            if load is not None and load.at == step.at:
                loads[load.out] = load
        for passed in calls(step):
            for buffer in passed.routine.touched:
                pending.pop(buffer, None)
    return loads


def copy_borrowed_entries(routines: Sequence[Routine]) -> None:
    """Let loads and stores make copies where a load of the buffer donates its entry while the value
    is still needed: both may be the same entry.

    Args:
        routines: those that others call come first.
    """
    anywhere = set().union(*(r.donating for r in routines))
    returned: dict[Routine, list[tuple[int, Load | Store]]] = {}
    for routine in routines:
        returned[routine] = []
        donations: dict[RemoteBuffer, list[int]] = {}  # steps that donate entries, in order
        for i, step in enumerate(routine.steps):
            for buffer in _donated_by(step):
                donations.setdefault(buffer, []).append(i)
        for i, step in enumerate(routine.steps):
            for slot, moved in _shared(step, returned):
                if moved.copies or moved.buffer not in anywhere:
                    continue
                returned[routine] += [(k, moved) for k in routine.kept.get(slot, ())]
                later = donations.get(moved.buffer, [])
                moved.copies = bisect_right(later, i) < bisect_right(later, routine.until[slot])
    for _, moved in returned[routines[-1]]:  # a later run may donate it
        moved.copies = True


def _shared(
    step: Step, returned: Mapping[Routine, Sequence[tuple[int, Load | Store]]]
) -> list[tuple[Slot, Load | Store]]:
    """Slots that share memory with an entry from `step` on, and the step that let them.

    Args:
        returned: of the routines that `step` may call, outputs that do.
    """
    if isinstance(step, Load):
        return [] if step.donates else [(step.out, step)]
    if isinstance(step, Store):
        return [(step.value, step)]
    shared = []
    for passed in calls(step):
        outs = step.outs if isinstance(step, Branch) else passed.outs
        for k, moved in returned[passed.routine]:
            slot = outs[k]
            if isinstance(step, Loop) and step.count > 1:
                moved.copies = True  # a later iteration may donate it, and is given it
            elif slot is not None:
                shared.append((slot, moved))
    return shared


def _donated_by(step: Step) -> Set[RemoteBuffer]:
    if isinstance(step, Load) and step.donates:
        return {step.buffer}
    return frozenset().union(*(passed.routine.donating for passed in calls(step)))


def _note_buffers(routine: Routine) -> None:
    """Say of a routine which buffers it touches, and of which it donates entries."""
    steps = routine.steps
    called = (passed.routine.touched for step in steps for passed in calls(step))
    own = (step.buffer for step in steps if isinstance(step, (Load, Store)))
    routine.touched = frozenset(own).union(*called)
    routine.donating = frozenset().union(*map(_donated_by, steps))
