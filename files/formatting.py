"""Formatting of values for messages: short, printable, and on one line."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

MAX_LENGTH = 70
"""Characters of a value in a message."""

MIN_WORD = 40
"""Characters to which a word of a sentence, such as a path, may be shortened."""

MAX_NAMES = 12
"""Names that a message lists."""


class _ShortRepr(reprlib.Repr):
    """`repr` of bounded length, also for self-referential data and huge integers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 3
        self.maxstring = self.maxother = MAX_LENGTH

    def repr_int(self, value: int, level: int) -> str:
        if value.bit_length() < 200:
            return repr(value)
        return f"an integer of about {int(value.bit_length() * 0.30103) + 1} digits"


_REPR = _ShortRepr()


def format_value(value: object) -> str:
    """Returns the `repr` of a value, shortened in the middle."""
    return _shorten(_REPR.repr(value))


def format_name(name: object, max_length: int = MAX_LENGTH) -> str:
    """Returns a name, shortened in the middle; characters that cannot be printed are escaped."""
    text = _REPR.repr(name) if isinstance(name, int) else str(name)  # str has a limit of digits
    if not text.isprintable():
        text = repr(text[: 4 * max_length])[1:-1]
    return _shorten(text, max_length)


def format_path(path: str | Path) -> str:
    """Returns a path, shortened in the middle if it is very long."""
    return format_name(path, 2 * MAX_LENGTH)


def format_number(value: float) -> str:
    """Returns a number with four decimals, or in scientific notation if very small or large."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"


def format_bytes(count: float) -> str:
    """Returns a number of bytes with a decimal unit, such as 131.07 kB."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    size, unit = next((unit_size for unit_size in units if count >= unit_size[0]), (1, "bytes"))
    return f"{count / size:,.2f} {unit}" if size > 1 else f"{count:,.0f} bytes"


def format_names(names: Iterable[str], max_length: int = 200) -> str:
    """Returns names joined by commas; those beyond `max_length` characters are only counted."""
    formatted = [format_name(name) for name in names]
    ends = accumulate(len(name) + 2 for name in formatted)
    fitting = sum(end - 2 <= max_length for end in ends)
    count = min(max(fitting, 1), MAX_NAMES)
    more = len(formatted) - count
    return ", ".join(formatted[:count]) + (f" and {more} more" if more > 0 else "")


def format_sentence(text: str, max_length: int) -> str:
    """Returns a sentence on one line of at most `max_length` characters.

    Its longest words, such as paths, are shortened in the middle. If that is not enough, the
    sentence stays longer.
    """
    words = text.split()
    while words and (excess := len(" ".join(words)) - max_length) > 0:
        index = max(range(len(words)), key=lambda i: len(words[i]))
        if len(words[index]) <= MIN_WORD:
            break
        words[index] = _shorten(words[index], max(len(words[index]) - excess, MIN_WORD))
    return " ".join(words)


def _shorten(text: str, max_length: int = MAX_LENGTH) -> str:
    if len(text) <= max_length:
        return text
    head = (max_length - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (max_length - 1 - head) :]}"
