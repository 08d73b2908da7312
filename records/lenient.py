"""Records without which a run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from files.shown import shown_name
from terminal.screen import say


class Lenient:
    """Lets a run go on without a record that cannot be written, and says so once for each."""

    def __init__(self) -> None:
        self._failing: set[str] = set()

    @contextmanager
    def unless_it_fails(self, what: str) -> Iterator[None]:
        """Turn a failure inside the context into a warning: no run ends for a record."""
        try:
            yield
        except Exception as error:  # whatever the disk, Weights & Biases or Matplotlib raise
            if what not in self._failing:
                self._failing.add(what)
                reason = " ".join(str(error).split()) or type(error).__name__
                say(f"warning: {what} is not written, the run goes on: {shown_name(reason, 200)}")
