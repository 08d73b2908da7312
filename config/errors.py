"""Configuration errors: one sentence with advice, exit code 2, no traceback."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from files.errors import UserError as UserError
from files.formatting import MAX_LENGTH, format_names

SHORTEST = 4
"""Characters of the shortest name that is compared by its beginning."""


class ConfigError(UserError, ValueError):
    """Raised for an invalid configuration: unknown names, wrong types or values out of range."""


class ContradictionError(ConfigError):
    """Raised for field values that exclude each other.

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
    """A warning to the user, in one sentence; the program continues."""


def find_similar_names(name: str, known_names: Iterable[str]) -> list[str]:
    """Returns up to three known names similar to `name`, the most similar first.

    Those of which one begins with the other, then the most similar; else those that contain it.
    """
    if len(name) > MAX_LENGTH:
        return []
    names = [one for one in known_names if len(one) >= SHORTEST]
    prefixes = [one for one in names if one.startswith(name) or name.startswith(one)]
    prefixes = get_close_matches(name, prefixes, n=3, cutoff=0.0)
    close = get_close_matches(name, list(known_names), n=3, cutoff=0.6)
    if len(name) < SHORTEST:
        return close
    return [*dict.fromkeys([*prefixes, *close])][:3] or [one for one in names if name in one][:3]


def did_you_mean(name: str, known_names: Iterable[str], max_length: int = 200) -> str:
    """Returns a message suffix that suggests known names similar to an unknown one.

    Without similar ones, it lists all known names if they fit into `max_length` characters.
    """
    names = list(known_names)
    close = find_similar_names(name, names)
    if close:
        return "; did you mean " + " or ".join(close) + "?"
    return "; there are: " + format_names(names, max_length)
