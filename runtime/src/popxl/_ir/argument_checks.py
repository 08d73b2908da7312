"""Arguments as their types: what cannot be taken is refused by its name."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any


def integer_of(what: str, name: str, value: Any, least: int) -> int:
    """Return an argument as an integer.

    Args:
        what: the function that takes it.
        name: of the argument.

    Raises:
        TypeError: it is none.
        ValueError: it is below `least`.
    """
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{what}: {name} must be an integer, not {value!r}")
    if number < least:
        raise ValueError(f"{what}: {name} must be at least {least}, not {value}")
    return number


def integers_of(what: str, name: str, values: Iterable[int], least: int = 0) -> tuple[int, ...]:
    """Return an argument as a tuple of integers, such as a shape.

    Raises:
        TypeError: it is none.
        ValueError: one is below `least`.
    """
    try:
        numbers = tuple(map(index, values))
    except TypeError:
        raise TypeError(f"{what}: {name} must be a tuple of integers, not {values!r}") from None
    if any(n < least for n in numbers):
        raise ValueError(f"{what}: {name} must have no number below {least}, but is {numbers}")
    return numbers


def check_type(what: str, name: str, value: Any, kind: type) -> None:
    """Raise TypeError unless an argument is of a type."""
    if not isinstance(value, kind):
        raise TypeError(f"{what}: {name} must be a {kind.__name__}, not {value!r}")
