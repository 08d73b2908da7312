"""Checks of function arguments, with errors that name the function and the argument."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any


def check_integer(function: str, name: str, value: Any, minimum: int) -> int:
    """Returns an argument as an integer; raises if it is not one, or below `minimum`.

    Args:
        function: name of the function, for messages.
        name: name of the argument, for messages.

    Raises:
        TypeError: the value is not an integer, or holds one that is not.
        ValueError: the value is below `minimum`.
    """
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{function}: {name} must be an integer, not {value!r}")
    if number < minimum:
        raise ValueError(f"{function}: {name} must be at least {minimum}, not {value}")
    return number


def check_integers(function: str, name: str, values: Iterable[int]) -> tuple[int, ...]:
    """Returns an argument, such as a shape, as a tuple of integers; raises if it is not one.

    Raises:
        TypeError: the value is not an integer, or holds one that is not.
        ValueError: one is below 0.
    """
    try:
        numbers = tuple(map(index, values))
    except TypeError:
        raise TypeError(f"{function}: {name} must be a tuple of integers, not {values!r}") from None
    if any(n < 0 for n in numbers):
        raise ValueError(f"{function}: {name} must have no number below 0, but is {numbers}")
    return numbers


def check_type(function: str, name: str, value: Any, kind: type) -> None:
    """Raises TypeError unless a function's argument has type `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{function}: {name} must be a {kind.__name__}, not {value!r}")
