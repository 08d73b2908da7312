"""What scripts tell the person at the screen, besides their results."""

from __future__ import annotations

import os
import sys

import popdist


def is_first_process() -> bool:
    """Whether this process speaks for all of them: the first one does."""
    try:
        return popdist.getInstanceIndex() == 0
    except popdist.DistributedError:  # this process has to report it
        return True


def say(text: str) -> None:
    """Print a line to standard error at once, above a progress bar if there is one. Only the first
    of several processes prints.
    """
    if not is_first_process():
        return
    if "tqdm" in sys.modules:
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()
    else:
        print(text, file=sys.stderr, flush=True)


def is_coloured() -> bool:
    """Whether what is said may have colours (https://no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stderr.isatty() and not plain


def hold_standard_streams() -> None:
    """Point closed standard streams (`2>&-`) at the null device. Otherwise the next file to be
    opened, such as a checkpoint, would become standard error, and XLA would write messages into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 - takes the lowest number that is free
            setattr(sys, name, stream)
