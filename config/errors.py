"""What a person at the command line can mend: one sentence, exit code 2, no traceback."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from files.errors import UserError as UserError
from files.shown import LONGEST, shown_names


class ConfigError(UserError, ValueError):
    """An invalid configuration: unknown names, wrong types, numbers that do not fit."""


class Notice(UserWarning):
    """Something a person should know, although the program continues. The message is one
    sentence."""


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """The known names that `name` may be a misspelling of, the likeliest first."""
    if len(name) > LONGEST:
        return []
    return get_close_matches(name, list(known), n=3, cutoff=0.6)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about the unknown `name`: the nearest known names, or all of them."""
    names = list(known)
    close = close_names(name, names)
    if close:
        return "; did you mean " + " or ".join(close) + "?"
    return "; there are: " + shown_names(names)
