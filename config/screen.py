"""What scripts tell the person at the screen, beside their results."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print a line to standard error, at once."""
    print(text, file=sys.stderr, flush=True)
