"""Reductions of both ways by the plan, and the seconds that they take on a machine's links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import popxl
from benchmarks.accumulation.programs import Program, collectives
from benchmarks.accumulation.settings import WAYS, Size
from planning.hardware.machines import Machine

VOCABULARY = 50400
"""GPT-J's: a plan holds no weights."""

MEASURED = {32: (3.4460, 2.0715), 64: (5.1833, 2.3332)}
"""Seconds of a naive and of a local step by micro-batches, that `optax.MultiSteps` and a loop of
gradients took on a TPU v2-8."""

OF_MEASURED = (12, 768, 512, 512, 8)
"""Layers, hidden size, length, batch and devices of these."""


@dataclass(frozen=True)
class Reductions:
    """Reductions of a device in a step.

    Attributes:
        count: reductions that it takes part in.
        nbytes: bytes that it brings into them.
        sent: bytes that it sends, in a ring.
        seconds: on a machine.
    """

    count: int
    nbytes: int
    sent: int
    seconds: float


@dataclass(frozen=True)
class Case:
    """Both ways with a number of micro-batches.

    Attributes:
        link: bytes per second that explain what `MEASURED` has; None: that is another size.
    """

    micro_batches: int
    naive: Reductions
    local: Reductions
    link: float | None

    def row(self) -> str:
        """A line of the table."""
        cells = [f"{self.micro_batches}"]
        for way in (self.naive, self.local):
            cells += [f"{way.count:,}", f"{way.nbytes / 1e9:.2f}", f"{way.seconds:.3f}"]
        cells.append("-" if self.link is None else f"{self.link / 1e9:.1f}")
        return f"| {' | '.join(cells)} |"


def head(machine: Machine) -> str:
    """The table's head."""
    names = ["micro-batches"]
    for way in WAYS:
        names += [f"{way}: reductions", "GB reduced", f"s on {machine.title}"]
    names.append("GB/s that explain the measured seconds")
    return f"| {' | '.join(names)} |\n|{' --- |' * len(names)}"


def planned(size: Size, counts: Sequence[int], devices: int, machine: Machine) -> Iterator[Case]:
    """Plan both ways for each number of micro-batches."""
    for count in counts:
        naive, local = (
            _reductions(Program(size, way, count, popxl.Ir(replication=devices)).ir, machine)
            for way in WAYS
        )
        of = (size.layers, size.hidden, size.length, size.batch, devices)
        link = None
        if of == OF_MEASURED and count in MEASURED:
            before, after = MEASURED[count]
            link = (naive.sent - local.sent) / (before - after)
        yield Case(count, naive, local, link)


def _reductions(ir: popxl.Ir, machine: Machine) -> Reductions:
    found = collectives(ir)
    return Reductions(
        sum(c.count for c in found),
        sum(c.nbytes for c in found),
        sum(c.sent for c in found),
        machine.reached_rates("float32", ir.replication_factor).exchange(found),
    )
