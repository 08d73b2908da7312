"""What is given to a model to generate from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Prompts:
    """Token ids of prompts, padded on the right.

    Attributes:
        words: int32 [n, length].
        mask: int32 [n, length], 1 = token.
        truncated: number of prompts that were longer and lost their end.
    """

    words: np.ndarray
    mask: np.ndarray
    truncated: int

    def __len__(self) -> int:
        return len(self.words)
