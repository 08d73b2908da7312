"""Liveness analysis of a graph's host steps: last use of each register, and memory it can share.

Registers are written once, so both follow from the steps alone. A register's value is in memory of
its own, of an input of the routine, or of an entry of a remote buffer; after a branch, or after a
loop whose outputs change places, in one of several. Memory is dead after a step if no later step
uses a register that can be in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from popxl._schedule.schedule import CallArgs, Loop, Register, Routine

MemoryRef = tuple[str, Any]  # ("own" | "input" | "entry", key); the key of an input is its index


class Liveness:
    """Last uses of one routine's virtual registers, and the memory that they can share.

    Attributes:
        last_use: index of the last step that reads a register; the number of steps for an output.
        memory: by register of an array, the memory that its value can be in.
    """

    def __init__(self, routine: Routine) -> None:
        self._routine = routine
        self.last_use: dict[Register, int] = {}
        self.memory: dict[Register, frozenset[MemoryRef]] = {}
        # Two are enough to know the last use by any register other than a given one.
        self._last_users: dict[MemoryRef, list[Register]] = {}
        for i, step in enumerate(routine.steps):
            self.last_use.update(dict.fromkeys(step.reads(), i))
        self.last_use.update(dict.fromkeys(routine.outputs, len(routine.steps)))
        for i, register in enumerate(routine.inputs):
            self.set_memory(register, [("input", i)])

    def set_memory(self, register: Register, memory: Iterable[MemoryRef]) -> None:
        """Records the memory that a register's array can share; host scalars have none."""
        if register in self._routine.specs:
            self.memory[register] = frozenset(memory)
            for m in self.memory[register]:
                registers = [*self._last_users.get(m, ()), register]
                self._last_users[m] = sorted(registers, key=self._last_use, reverse=True)[:2]

    def is_last_use(self, register: Register, index: int, uses: Counter[Register]) -> bool:
        """True if step `index` is the last to use a register's memory, and reads it just once."""
        return uses[register] == 1 and self.last_use[register] == index and not any(
            other != register and self._last_use(other) >= index
            for m in self.memory[register]
            for other in self._last_users[m]
        )  # fmt: skip

    def memory_last_use(self) -> dict[Register, int]:
        """Returns, for each register, the index of the last step that uses its array's memory."""
        return {
            register: max(
                map(self._last_use, [register, *(self._last_users[m][0] for m in memory)])
            )
            for register, memory in self.memory.items()
        }

    def call_output_memory(
        self, call_args: CallArgs, output: int, carried: Mapping[int, int] = MappingProxyType({})
    ) -> set[MemoryRef]:
        """Returns the memory that an output of a called routine (host steps) can share.

        Args:
            carried: for inputs of a loop, the output that becomes the input in the next iteration.
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

    def record_dead_registers(self) -> None:
        """Records in each step the registers whose last use it is."""
        constants = set(self._routine.constants)
        for i, step in enumerate(self._routine.steps):
            donated = set(step.body.donated) if isinstance(step, Loop) else set()
            registers: Iterable[Register] = dict.fromkeys([*step.reads(), *step.writes()])
            step.dead_registers = tuple(
                r for r in registers
                if self.last_use.get(r, i) == i and r not in donated and r not in constants
            )  # fmt: skip

    def _last_use(self, register: Register) -> int:
        return self.last_use.get(register, -1)
