"""Errors that the user can fix: one sentence, exit code 2, no traceback."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from files.errors import UserError as UserError
from files.formatting import MAX_LENGTH, format_names

SHORTEST = 4
"""Characters of the shortest name that is compared by its beginning."""


class ConfigError(UserError, ValueError):
    """An invalid configuration: unknown names, wrong types, or values out of range."""


class ContradictionError(ConfigError):
    """Values that exclude each other.

    Attributes:
        fields: dotted names of all of them.
        remedies: values with which one of them no longer excludes the others, by dotted name; a
            field that must not give way has none.
    """

    def __init__(self, message: str, remedies: Mapping[str, Any], *others: str) -> None:
        super().__init__(message)
        self.remedies = remedies
        self.fields = (*remedies, *others)


class UserNotice(UserWarning):
    """A warning for the user, in one sentence; the program continues."""


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """Returns up to three known names that `name` could stand for, the most likely first.

    Those of which one begins with the other, then the most similar; else those that contain it.
    """
    if len(name) > MAX_LENGTH:
        return []
    names = [one for one in known if len(one) >= SHORTEST]
    prefixes = [one for one in names if one.startswith(name) or name.startswith(one)]
    prefixes = get_close_matches(name, prefixes, n=3, cutoff=0.0)
    close = get_close_matches(name, list(known), n=3, cutoff=0.6)
    if len(name) < SHORTEST:
        return close
    return [*dict.fromkeys([*prefixes, *close])][:3] or [one for one in names if name in one][:3]


def did_you_mean(name: str, known: Iterable[str], longest: int = 200) -> str:
    """Returns the end of a message about the unknown `name`: similar known names, or all known
    names in at most `longest` characters."""
    names = list(known)
    close = close_names(name, names)
    if close:
        return "; did you mean " + " or ".join(close) + "?"
    return "; there are: " + format_names(names, longest)
