"""Streams of a program by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import popxl
from popxl import DeviceToHostStream, HostToDeviceStream, TensorSpec
from popxl.streams import Stream
from popxl_addons.dot_tree import DotTree

__all__ = ["InputStreams", "OutputStreams"]

StreamType = TypeVar("StreamType", bound=Stream)
CLS = TypeVar("CLS", bound="_StreamsBase[Any]")


class _StreamsBase(DotTree[StreamType]):
    """Streams by name. Each is given as a stream, a TensorSpec, or a pair (shape, dtype).

    Iterating gives the streams in the order of their names' definition.
    """

    stream_init: ClassVar[Callable[..., Any]]

    def insert(self, key: str | int, value: Any, overwrite: bool = False) -> None:
        """As `DotTree.insert`; a spec becomes a stream called `key` of the current Ir."""
        if isinstance(value, (TensorSpec, tuple, list)):
            shape, dtype = (value.shape, value.dtype) if isinstance(value, TensorSpec) else value
            value = type(self).stream_init(shape, dtype, name=str(key))
        super().insert(key, value, overwrite)

    @classmethod
    def from_streams(cls: type[CLS], streams: Iterable[Stream]) -> CLS:
        """The given streams under their ids."""
        return cls.from_dict({s.tensor_id: s for s in streams})

    def __iter__(self) -> Iterator[StreamType]:
        return iter(self.values_flat())

    def __len__(self) -> int:
        return self.len_flat()


class InputStreams(_StreamsBase[HostToDeviceStream]):
    """Host-to-device streams by name: `InputStreams(words=((2, 128), popxl.int32))`."""

    stream_init = staticmethod(popxl.h2d_stream)


class OutputStreams(_StreamsBase[DeviceToHostStream]):
    """Device-to-host streams by name: `OutputStreams(loss=((), popxl.float32))`."""

    stream_init = staticmethod(popxl.d2h_stream)
