"""Streams: FIFOs through which host and device exchange data during a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from popxl import context
from popxl._ir.argument_checks import check_integers
from popxl.dtypes import dtype as Dtype
from popxl.tensor import TensorSpec

if TYPE_CHECKING:
    from typing import Self

    from popxl.ir import Ir


class Stream:
    """FIFO of tensors of one spec; created by `h2d_stream` and `d2h_stream`."""

    _prefix = "stream"
    _ir: Ir
    _spec: TensorSpec
    _id: str

    def __init__(self) -> None:
        raise TypeError(f"Cannot create {type(self).__qualname__} directly; use popxl.h2d_stream")

    @classmethod
    def _make(cls, shape: Iterable[int], dtype: Dtype, name: str | None) -> Self:
        self = object.__new__(cls)
        self._ir = context.get_ir()
        self._spec = TensorSpec(check_integers(cls._prefix, "shape", shape), dtype)
        self._id = self._ir._register_stream(self, name or cls._prefix)
        return self

    @property
    def dtype(self) -> Dtype:
        return self._spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one transfer on one replica."""
        return self._spec.shape

    @property
    def spec(self) -> TensorSpec:
        return self._spec

    @property
    def tensor_id(self) -> str:
        """Unique name of the stream in the Ir."""
        return self._id

    def __str__(self) -> str:
        return f"{type(self).__name__}[{self._id} {self.dtype!r} {self.shape}]"

    __repr__ = __str__


class HostToDeviceStream(Stream):
    """Host-to-device stream: filled from the `inputs` of `session.run`, read by `ops.host_load`."""

    _prefix = "h2d_stream"


class DeviceToHostStream(Stream):
    """Device-to-host stream: written by `ops.host_store`, returned by `session.run`."""

    _prefix = "d2h_stream"


def h2d_stream(shape: Iterable[int], dtype: Dtype, name: str | None = None) -> HostToDeviceStream:
    """Creates a host-to-device stream of tensors of `shape` and `dtype` in the current Ir."""
    return HostToDeviceStream._make(shape, dtype, name)


def d2h_stream(shape: Iterable[int], dtype: Dtype, name: str | None = None) -> DeviceToHostStream:
    """Creates a device-to-host stream of tensors of `shape` and `dtype` in the current Ir."""
    return DeviceToHostStream._make(shape, dtype, name)
