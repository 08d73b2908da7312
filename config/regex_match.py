"""Time-limited matching of regular expressions from the user or a file."""

from __future__ import annotations

import regex

from config.errors import ConfigError
from files.formatting import format_name

SECONDS = 1.0
"""That a match may take."""


def full_match(expression: str, text: str) -> bool:
    """Returns whether a regular expression matches a whole text.

    Raises:
        ConfigError: it takes too long.
    """
    try:
        return regex.fullmatch(expression, text, timeout=SECONDS) is not None
    except TimeoutError:
        raise ConfigError(
            f"the expression {format_name(expression, 60)} takes more than {SECONDS:g} s for "
            f"{format_name(text, 60)}: give names, or one without repetitions inside repetitions"
        ) from None
