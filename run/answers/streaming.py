"""Printing a text while it is written: whole words and whole characters only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

HALF = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of half a character are decoded to."""

_WITHOUT_SPACES = 0x2E80
"""The first character of scripts, such as Chinese, that put no spaces between words."""


def pieces(texts: Iterable[str]) -> Iterator[str]:
    """What can be printed each time that a text has grown, without space around it as a whole.

    Args:
        texts: what there is of it, each time more.
    """
    printed = text = ""
    for grown in texts:
        text = grown.lstrip()
        whole = text[: _end(text)]
        if len(whole) > len(printed) and whole.startswith(printed):
            yield whole[len(printed) :]
            printed = whole
    yield text.rstrip()[len(printed) :]


def _end(text: str) -> int:
    """Where the last word ends that nothing can be added to."""
    whole = text.rstrip(HALF)
    if whole and whole == text and ord(whole[-1]) >= _WITHOUT_SPACES:
        return len(whole)
    return len(whole[: max(0, *(whole.rfind(space) for space in " \n\t"))].rstrip())
