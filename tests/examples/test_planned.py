"""The program that docs/planning.md shows."""

from __future__ import annotations

from examples.planned import plan


def test_the_numbers_are_those_of_the_program() -> None:
    parts = {part.name: part for part in plan.parts}
    assert parts["weights"].host_to_device == 12 * 512 * 512 * 4
    assert parts["layer"].flops == 12 * 2 * 64 * 512 * 512
    (sums,) = parts["layer"].collectives
    assert (sums.kind, sums.group_size, sums.count) == ("all_reduce", 2, 12)
    assert plan.host_bytes == 2 * 12 * 512 * 512 * 4
