"""Arrays by name that are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np

from files.lazy import Lazy

Arrays = Mapping[str, np.ndarray]


class Computed(Lazy[np.ndarray]):
    """Arrays made on demand, so that not all of them have to be in memory."""

    concurrent: ClassVar[bool] = True
    """Several threads may ask for some at a time."""

    def __init__(self, makers: Mapping[str, Callable[[], np.ndarray]]) -> None:
        super().__init__(makers)
        self._makers = makers

    def __getitem__(self, name: str) -> np.ndarray:
        return self._makers[name]()
