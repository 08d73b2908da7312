"""Texts that are too long: what was cut or dropped, and what becomes of long targets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

LongTargets = Literal["refuse", "cut", "drop"]


@dataclass(frozen=True)
class Cuts:
    """How many texts lost a part, and how many examples were dropped."""

    prompts: int = 0
    targets: int = 0
    dropped: int = 0

    def __add__(self, other: Cuts) -> Cuts:
        return Cuts(
            self.prompts + other.prompts,
            self.targets + other.targets,
            self.dropped + other.dropped,
        )

    def notes(self, length: int) -> list[str]:
        """For people; nothing where nothing was cut. `length`: tokens of a sample."""
        found = (
            (self.prompts, f"{self.prompts} cut to {length} tokens"),
            (self.targets, f"{self.targets} with a target cut"),
            (self.dropped, f"{self.dropped} dropped, whose target is too long"),
        )
        return [note for count, note in found if count]


def fitted_targets(
    tokens: Iterable[np.ndarray],
    texts: Sequence[str],
    length: int,
    long_targets: LongTargets,
    field: str,
) -> tuple[list[int], list[np.ndarray], Cuts]:
    """The targets of at most `length` tokens.

    Args:
        tokens: of each target, the end token included.
        texts: the targets, for messages.
        field: of the configuration, that sets `length`.

    Returns:
        The indices of the examples that are kept, their targets' tokens, and what was left out.

    Raises:
        ValueError: one is longer, and `long_targets` is "refuse".
    """
    rows = list(tokens)
    long = [i for i, row in enumerate(rows) if len(row) > length]
    if long and long_targets == "refuse":
        longest = max(long, key=lambda i: len(rows[i]))
        text = texts[longest] if len(texts[longest]) <= 40 else f"{texts[longest][:37]}..."
        raise ValueError(
            f"the target {text!r} has {len(rows[longest])} tokens with the end token, but "
            f"{field} is {length}: set it to {len(rows[longest])} or more, or say "
            "--data.long_targets cut or drop"
        )
    if long_targets == "drop":
        gone = set(long)
        kept = [i for i in range(len(rows)) if i not in gone]
        return kept, [rows[i] for i in kept], Cuts(dropped=len(long))
    return list(range(len(rows))), [row[:length] for row in rows], Cuts(targets=len(long))
