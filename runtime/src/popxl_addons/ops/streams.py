"""Host transfers that create their stream, for short programs and tests."""

from __future__ import annotations

import numpy as np

import popxl
from popxl import DeviceToHostStream, HostToDeviceStream, ops
from popxl._ir.argument_checks import check_type
from popxl.tensor import HostTensor
from popxl.utils import to_numpy

__all__ = ["host_load", "host_store"]


def host_load(
    t: HostTensor, dtype: popxl.dtype, name: str
) -> tuple[np.ndarray, HostToDeviceStream, popxl.Tensor]:
    """Create a host-to-device stream like `t` and load from it.

    Args:
        t: data of one transfer for one replica.
        dtype: element type of the stream.
        name: of the stream and the tensor.

    Returns:
        `t` as an array of `dtype`, the stream to pass it to, and the loaded tensor.
    """
    data = to_numpy(t, dtype)
    stream = popxl.h2d_stream(data.shape, dtype, name)
    return data, stream, ops.host_load(stream, name)


def host_store(t: popxl.Tensor) -> DeviceToHostStream:
    """Create a device-to-host stream for `t` and store `t` to it."""
    check_type("host_store", "t", t, popxl.Tensor)
    stream = popxl.d2h_stream(t.shape, t.dtype, f"{t.name}_d2h")
    ops.host_store(stream, t)
    return stream
