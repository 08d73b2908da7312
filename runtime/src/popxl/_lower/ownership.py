"""Which memory may be used again: last uses, donations, and the copies that these make necessary.

A value belongs to the routine that makes it. Its memory goes to a segment that reads it last, if a
result has the same shape and type, or with it to a routine that consumes that input. What came in
from a caller belongs to the caller, except for inputs that change or are carried on, which callers
hand over; they copy what they need themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from popxl._lower.schedule import (
    Branch,
    Load,
    Loop,
    Routine,
    Run,
    Slot,
    Step,
    Store,
    calls,
)

if TYPE_CHECKING:
    from popxl._lower.segment import Segment
    from popxl.remote_buffer import RemoteBuffer


def own(routine: Routine, candidates: set[int]) -> None:
    """Decide for all steps of `routine`, in place.

    Args:
        candidates: inputs that callers may be asked to hand over.
    """
    _Owner(routine, candidates).decide()


@dataclass
class _Owner:
    routine: Routine
    candidates: set[int]
    owned: set[Slot] = field(default_factory=set)
    last_use: dict[Slot, int] = field(default_factory=dict)
    given: set[Slot] = field(default_factory=set)  # inputs whose memory was given away

    def decide(self) -> None:
        routine = self.routine
        end = len(routine.steps)
        for i, step in enumerate(routine.steps):
            self.last_use.update(dict.fromkeys(step.reads(), i))
        returned = (*routine.outputs, *routine.changed.values())
        self.last_use.update(dict.fromkeys(returned, end))
        inputs = {routine.inputs[i]: i for i in self.candidates}
        self.owned |= {s for s in inputs if s in routine.specs}
        giving = self._giving_loads()
        for i, step in enumerate(routine.steps):
            self._step(i, step, giving)
        consumed = self.given & inputs.keys()
        routine.consumed = frozenset(inputs[s] for s in consumed)
        self._mark_returned(set(inputs) - consumed)  # type: ignore[arg-type]
        self._free()

    # ---- loads that may give their memory away --------------------------------------------------
    def _giving_loads(self) -> dict[Slot, Load]:
        """Loads whose entry is stored to before anything else touches the buffer, by their slot."""
        found: dict[Slot, Load] = {}
        pending: dict[RemoteBuffer, Load] = {}
        for step in self.routine.steps:
            if isinstance(step, Load):
                pending[step.buffer] = step
            elif isinstance(step, Store):
                load = pending.pop(step.buffer, None)
                if load is not None and load.at == step.at:
                    found[load.out] = load
            for passed in calls(step):
                for buffer in _touched(passed.routine):
                    pending.pop(buffer, None)
        return found

    # ---- steps ----------------------------------------------------------------------------------
    def _step(self, index: int, step: Step, giving: dict[Slot, Load]) -> None:
        if isinstance(step, Run):
            self._run(index, step, giving)
            self.owned.update(step.outs)
        elif isinstance(step, Loop):
            self._loop(index, step)
        elif isinstance(step, Store):
            if step.value in self.owned:  # the entry has it from now on; others may only read it
                self.owned.discard(step.value)
                self.given.add(step.value)
            else:
                step.copies = True
        elif isinstance(step, Branch):
            for passed in step.branches:
                assert not passed.routine.consumed
        if any(not _all_owned(passed.routine) for passed in calls(step)):
            self.owned -= set(step.reads())  # an output may be the same memory
            for slot in step.reads():
                giving.pop(slot, None)

    def _may_give(self, slot: Slot, index: int, uses: Counter[Slot]) -> bool:
        return slot in self.owned and self.last_use[slot] == index and uses[slot] == 1

    def _run(self, index: int, step: Run, giving: dict[Slot, Load]) -> None:
        segment, uses = step.segment, Counter(step.args)
        room = Counter((s.shape, s.dtype) for s in segment.result_specs)
        donated = []
        for i in _changed_first(segment):
            slot = step.args[i]
            if i in segment.numbers:
                continue
            spec = self.routine.specs[slot]
            kind = spec.shape, spec.dtype
            load = giving.get(slot)
            may = self._may_give(slot, index, uses) or (
                load is not None and self.last_use[slot] == index and uses[slot] == 1
            )
            if may and room[kind]:
                room[kind] -= 1
                donated.append(i)
                if load is not None:
                    load.gives = True
                self.given.add(slot)
        segment.donated = tuple(sorted(donated))

    def _loop(self, index: int, step: Loop) -> None:
        body, routine = step.body, step.body.routine
        uses = Counter(step.reads())
        copies = set()
        for i in routine.consumed:
            slot = body.args[i]
            if self._may_give(slot, index, uses):
                self.given.add(slot)
            else:
                copies.add(i)
        body.copies = frozenset(copies)
        if step.count != 1:
            kept = {i for i in range(step.carried) if i not in routine.owned}
            kept |= {i for i in body.changed if i not in routine.owned_changed}
            step.recopied = frozenset(kept & routine.consumed)
        self.owned.update(body.outs[i] for i in routine.owned if body.outs[i] is not None)  # type: ignore[misc]
        self.owned.update(s for i, s in body.changed.items() if i in routine.owned_changed)
        body.gives = tuple(
            s for s in dict.fromkeys(body.args)
            if self.last_use[s] == index and s not in self.routine.start
        )  # fmt: skip

    # ---- the end --------------------------------------------------------------------------------
    def _mark_returned(self, lent: set[Slot]) -> None:
        routine = self.routine
        returned = Counter([*routine.outputs, *routine.changed.values()])
        mine = {s for s in self.owned if returned[s] == 1} - lent
        routine.owned = frozenset(i for i, s in enumerate(routine.outputs) if s in mine)
        routine.owned_changed = frozenset(i for i, s in routine.changed.items() if s in mine)

    def _free(self) -> None:
        """Let each step free what is not needed after it."""
        known = set(self.routine.start)
        for i, step in enumerate(self.routine.steps):
            given = set(step.body.gives) if isinstance(step, Loop) else set()
            slots: Iterable[Slot] = dict.fromkeys([*step.reads(), *step.writes()])
            step.last = tuple(
                s for s in slots
                if self.last_use.get(s, i) == i and s not in given and s not in known
            )  # fmt: skip


def _all_owned(routine: Routine) -> bool:
    outputs = {i for i, s in enumerate(routine.outputs) if s in routine.specs}
    return outputs <= routine.owned and routine.changed.keys() <= routine.owned_changed


def keep_apart(routines: Iterable[Routine]) -> None:
    """Let loads and stores make copies where a load of the buffer gives its memory away while the
    value is still needed: both may be the same entry."""
    routines = list(routines)
    for routine in routines:
        end = len(routine.steps)
        last = {s: i for i, step in enumerate(routine.steps) for s in step.reads()}
        last.update(dict.fromkeys((*routine.outputs, *routine.changed.values()), end))
        anywhere = set().union(*map(_given, routines))
        for i, step in enumerate(routine.steps):
            if not isinstance(step, (Load, Store)) or step.buffer not in anywhere:
                continue
            if step.copies or (isinstance(step, Load) and step.gives):
                continue
            until = last.get(step.out if isinstance(step, Load) else step.value, i)
            step.copies = until == end or any(
                step.buffer in _given_by(later) for later in routine.steps[i + 1 : until + 1]
            )


def _given_by(step: Step) -> set[RemoteBuffer]:
    if isinstance(step, Load) and step.gives:
        return {step.buffer}
    return set().union(*(_given(passed.routine) for passed in calls(step)))


def _given(routine: Routine) -> set[RemoteBuffer]:
    """Buffers whose entries `routine` gives away, with all that it calls."""
    return set().union(*map(_given_by, routine.steps))


def _changed_first(segment: Segment) -> list[int]:
    """Arguments in the order in which memory is given: first of owners that the segment changes."""
    results = set(segment.results)
    return sorted(range(len(segment.args)), key=lambda i: segment.args[i] not in results)


def _touched(routine: Routine) -> set[RemoteBuffer]:
    """Buffers that a routine loads from or stores to, with all that it calls."""
    found: set[RemoteBuffer] = set()
    for step in routine.steps:
        if isinstance(step, (Load, Store)):
            found.add(step.buffer)
        for passed in calls(step):
            found |= _touched(passed.routine)
    return found
