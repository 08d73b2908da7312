"""Host streams of a program by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, TypeVar, overload

import popxl
from popxl import DeviceToHostStream, HostToDeviceStream, TensorSpec
from popxl.streams import Stream
from popxl_addons.utils import OrderedDict

__all__ = ["InputStreams", "OutputStreams"]

StreamType = TypeVar("StreamType", bound=Stream)
CLS = TypeVar("CLS", bound="_StreamsBase[Any]")


class _StreamsBase(OrderedDict[str, StreamType]):
    """Base class of a program's streams by name, in declaration order.

    Each is given as a stream, a TensorSpec, or a pair (shape, dtype), of which a stream of that
    name is made in the current Ir. A mapping, with three additions: names are attributes too,
    integers and slices count positions, and iterating gives the streams, not their names.
    """

    stream_init: ClassVar[Callable[..., Any]]

    def __init__(self, *args: Any, **streams: Any) -> None:
        super().__init__()
        self.update(*args, **streams)

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, (TensorSpec, tuple, list)):
            shape, dtype = (value.shape, value.dtype) if isinstance(value, TensorSpec) else value
            value = type(self).stream_init(shape, dtype, name=key)
        super().__setitem__(key, value)

    @overload
    def __getitem__(self, key: str | int) -> StreamType: ...
    @overload
    def __getitem__(self, key: slice) -> list[StreamType]: ...
    def __getitem__(self, key: str | int | slice) -> StreamType | list[StreamType]:
        if isinstance(key, (int, slice)):
            return list(self.values())[key]
        return super().__getitem__(key)

    def __getattr__(self, name: str) -> StreamType:
        try:
            return super().__getitem__(name)
        except KeyError:
            raise AttributeError(f"there is no stream {name!r}: {list(self.keys())}") from None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    @classmethod
    def from_streams(cls: type[CLS], streams: Iterable[Stream]) -> CLS:
        """Create the collection from existing streams, named by their ids."""
        return cls({s.tensor_id: s for s in streams})

    def __repr__(self) -> str:
        body = ", ".join(f"{name}={stream!r}" for name, stream in self.items())
        return f"{type(self).__name__}({body})"


class InputStreams(_StreamsBase[HostToDeviceStream]):
    """Host-to-device streams by name: `InputStreams(x=((2, 128), popxl.int32))`."""

    stream_init = staticmethod(popxl.h2d_stream)


class OutputStreams(_StreamsBase[DeviceToHostStream]):
    """Device-to-host streams by name: `OutputStreams(loss=((), popxl.float32))`."""

    stream_init = staticmethod(popxl.d2h_stream)
