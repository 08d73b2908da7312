"""Placement of temporaries in the memory of a segment's results, until XLA writes those."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from popxl.plan.flat_jaxpr import PrimitiveValue
from popxl.plan.primitives import nbytes


@dataclass(frozen=True)
class Lifetime:
    """The primitives, by index, between which a value is in memory.

    Attributes:
        start, end: its maker and its last reader.
        can_overwrite: true if its kernel can write it over a value of equal size that it reads.
    """

    value: PrimitiveValue
    start: int
    end: int
    can_overwrite: bool

    @property
    def nbytes(self) -> int:
        return nbytes(self.value.aval)

    def can_share(self, other: Lifetime) -> bool:
        """True if both values can have the same memory, one after the other."""
        first, second = sorted((self, other), key=lambda lifetime: lifetime.start)
        if first.end == second.start:
            return second.can_overwrite and first.nbytes == second.nbytes
        return first.end < second.start


def values_in_results(
    temporaries: Iterable[Lifetime], results: Iterable[Lifetime]
) -> set[PrimitiveValue]:
    """Returns the temporaries that XLA places in memory of results.

    The largest comes first, and takes the smallest result that is large enough and free.
    """
    tenants = {result: [result] for result in sorted(results, key=lambda r: r.nbytes)}
    placed = set()
    for temporary in sorted(temporaries, key=lambda t: -t.nbytes):
        for result, others in tenants.items():
            if temporary.nbytes <= result.nbytes and all(map(temporary.can_share, others)):
                others.append(temporary)
                placed.add(temporary.value)
                break
    return placed


def without_donated(
    results: Iterable[PrimitiveValue], donated: Iterable[PrimitiveValue]
) -> Sequence[PrimitiveValue]:
    """Returns the results that have memory of their own, not that of a donated argument."""
    left = Counter((v.aval.shape, v.aval.dtype) for v in donated)
    own = []
    for v in results:
        left[v.aval.shape, v.aval.dtype] -= 1
        if left[v.aval.shape, v.aval.dtype] < 0:
            own.append(v)
    return own
