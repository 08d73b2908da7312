"""Mappings whose values are read or made when they are asked for, so that memory holds a few."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

Value = TypeVar("Value", covariant=True)


class Lazy(Mapping[str, Value]):
    """A mapping that knows its names; asking for a name does not make its value."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    @abstractmethod
    def __getitem__(self, name: str) -> Value:
        """Make the value. Raises KeyError if there is none of that name."""

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
