"""What is given to a model to generate from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Prompts:
    """Prompts and their token ids, padded on the right.

    Attributes:
        texts: what the tokens say, before any are cut.
        words: int32 [n, length].
        mask: int32 [n, length], 1 = token.
        truncated: number of prompts that were longer and lost a part.
    """

    texts: Sequence[str]
    words: np.ndarray
    mask: np.ndarray
    truncated: int

    def __len__(self) -> int:
        return len(self.words)
