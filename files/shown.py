"""How values from outside appear in messages: short, and on one line."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

LONGEST = 70
"""Characters of a value in a message."""

MIN_WORD = 40
"""Characters to which a word of a sentence, such as a path, may be shortened."""

MAX_NAMES = 12
"""Names that a message lists."""


class _Short(reprlib.Repr):
    """`repr` within limits, which also handles data that contain themselves, and huge numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 3
        self.maxstring = self.maxother = LONGEST

    def repr_int(self, value: int, level: int) -> str:
        if value.bit_length() < 200:
            return repr(value)
        return f"an integer of about {int(value.bit_length() * 0.30103) + 1} digits"


_SHORT = _Short()


def shown(value: object) -> str:
    """A value as Python writes it, shortened."""
    return _cut(_SHORT.repr(value))


def shown_name(name: object, longest: int = LONGEST) -> str:
    """A name or path as it is, shortened in the middle; what cannot be printed is escaped."""
    text = _SHORT.repr(name) if isinstance(name, int) else str(name)  # str has a limit of digits
    if not text.isprintable():
        text = repr(text[: 4 * longest])[1:-1]
    return _cut(text, longest)


def shown_path(path: str | Path) -> str:
    """A path, shortened in the middle if it is very long."""
    return shown_name(path, 2 * LONGEST)


def shown_number(value: float) -> str:
    """Four decimals, or a power of ten for numbers too small or too large for that."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"


def shown_bytes(count: float) -> str:
    """A number of bytes in a unit that fits, such as 131.07 kB."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    size, unit = next((each for each in units if count >= each[0]), (1, "bytes"))
    return f"{count / size:,.2f} {unit}" if size > 1 else f"{count:,.0f} bytes"


def shown_names(names: Iterable[str], longest: int = 200) -> str:
    """A list of names, shortened at its end if it is longer than `longest` characters."""
    every = [shown_name(name) for name in names]
    ends = accumulate(len(name) + 2 for name in every)
    fitting = sum(end - 2 <= longest for end in ends)
    count = min(max(fitting, 1), MAX_NAMES)
    more = len(every) - count
    return ", ".join(every[:count]) + (f" and {more} more" if more > 0 else "")


def shown_sentence(text: str, longest: int) -> str:
    """A sentence on one line. To fit `longest` characters, its longest words, such as paths, are
    shortened in the middle. The words of the sentence itself stay, however many there are.
    """
    words = text.split()
    while words and (excess := len(" ".join(words)) - longest) > 0:
        at = max(range(len(words)), key=lambda i: len(words[i]))
        if len(words[at]) <= MIN_WORD:
            break
        words[at] = _cut(words[at], max(len(words[at]) - excess, MIN_WORD))
    return " ".join(words)


def _cut(text: str, longest: int = LONGEST) -> str:
    if len(text) <= longest:
        return text
    head = (longest - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"
