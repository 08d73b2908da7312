"""Arrays by name that are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import numpy as np

Arrays = Mapping[str, np.ndarray]


class Computed(Mapping[str, np.ndarray]):
    """Arrays made on demand, so that not all of them have to be in memory."""

    concurrent: ClassVar[bool] = True
    """Several threads may ask for some at a time."""

    def __init__(self, makers: Mapping[str, Callable[[], np.ndarray]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> np.ndarray:
        return self._makers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)
