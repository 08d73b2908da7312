"""Loads from and stores to host streams during a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from popxl import context
from popxl._analysis.effects import Effects
from popxl._ir.op_registry import NoGrad, define
from popxl.errors import SpecError
from popxl.ops._args import check_tensors
from popxl.ops._emit import emit
from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
from popxl.tensor import Tensor

if TYPE_CHECKING:
    from popxl._analysis.functionalization import Node
    from popxl._analysis.tracer_protocol import TracerProtocol


def _execute_load(tracer: TracerProtocol, node: Node, arrays: Sequence[Any]) -> Sequence[Any]:
    """Takes a host-to-device stream's next transfer from the executable's arguments."""
    return [tracer.host_load(node.attrs["stream"])]


def _execute_store(tracer: TracerProtocol, node: Node, arrays: Sequence[Any]) -> Sequence[Any]:
    """Appends a device-to-host stream's transfer to the executable's results."""
    tracer.host_store(node.attrs["stream"], arrays[0])
    return []


_LOAD = define(
    "host_load",
    execute=_execute_load,
    infer=lambda stream: [stream.spec],
    grad=NoGrad("host data is no function of the program"),
    effects=lambda op: Effects(loads={op.attrs["stream"]: None}),
)
_STORE = define(
    "host_store",
    execute=_execute_store,
    infer=lambda spec, stream: [],
    grad=NoGrad("results on the host receive no gradient"),
    effects=lambda op: Effects(stores={op.attrs["stream"]: None}),
)


def host_load(h2d_stream: HostToDeviceStream, name: str | None = None) -> Tensor:
    """Returns the next transfer of a host-to-device stream.

    Streams are FIFOs shared by all their loads: two loads take successive transfers.

    Args:
        name: the result is called `<name>_hostload`; default: that of the stream.

    Raises:
        TypeError: it is no such stream.
    """
    _check_stream(h2d_stream, HostToDeviceStream, "host_load")
    name = name or h2d_stream.tensor_id
    return emit(_LOAD, [], {"stream": h2d_stream}, names=[f"{name}_hostload"])[0]


def host_store(d2h_stream: DeviceToHostStream, t: Tensor) -> None:
    """Appends `t` to a device-to-host stream.

    Raises:
        TypeError: it is no such stream.
        ValueError: `t` has another shape or dtype than the stream.
    """
    _check_stream(d2h_stream, DeviceToHostStream, "host_store")
    check_tensors("host_store", t)
    if (t.shape, t.dtype) != (d2h_stream.shape, d2h_stream.dtype):
        from popxl._analysis.printing import format_spec

        raise SpecError(
            f"host_store at {context.get_source_location()}: {t.id!r} is {format_spec(t.spec)}, "
            f"but the stream {d2h_stream.tensor_id!r} takes {format_spec(d2h_stream.spec)}"
        )
    emit(_STORE, [t], {"stream": d2h_stream})


def _check_stream(stream: Stream, kind: type[Stream], op_name: str) -> None:
    if not isinstance(stream, kind):
        raise TypeError(
            f"{op_name} at {context.get_source_location()} takes a {kind.__name__}, but got "
            f"{stream!r}"
        )
    if stream._ir is not context.get_ir():
        raise ValueError(
            f"{op_name}: stream {stream.tensor_id!r} belongs to another Ir: make one in this"
        )
