"""What scripts tell the person at the screen, besides their results."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print a line to standard error, at once; above a progress bar, if there is one."""
    if "tqdm" in sys.modules:
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()
    else:
        print(text, file=sys.stderr, flush=True)
