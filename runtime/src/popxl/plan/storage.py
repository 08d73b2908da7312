"""Values that are in the same memory."""

from __future__ import annotations

from popxl.plan.values import Value


class Storage:
    """Which values are in memory, and under which other value's name they are there."""

    def __init__(self) -> None:
        self._same: dict[Value, Value] = {}

    def rename(self, value: Value, source: Value) -> None:
        self._same[value] = source

    def of(self, value: Value) -> Value:
        """The value whose memory `value` is in."""
        while value in self._same:
            value = self._same[value]
        return value
