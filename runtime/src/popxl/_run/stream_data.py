"""Conversion of stream data between the user's host arrays and device arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np

import popdist
from popxl._devices.mesh import create_per_replica_sharding
from popxl._ir.host_data import device_view, host_array
from popxl._storage.replica_arrays import local_data, put_shards_async
from popxl.streams import DeviceToHostStream, HostToDeviceStream
from popxl.tensor import HostScalarTensor
from popxl.utils import downcast_np_dtypes, to_numpy

if TYPE_CHECKING:
    from popxl._run.program import Program

d2hStreamBufferMaps = Mapping[DeviceToHostStream, np.ndarray]
h2dStreamBufferMaps = Mapping[HostToDeviceStream, HostScalarTensor]


class HostStreams:
    """Host side of a program's streams; with several processes, the data of the local replicas."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._ir = program.ir

    @property
    def _num_transfers(self) -> int:
        return self._ir.num_host_transfers

    @property
    def _num_replicas(self) -> int:
        return self._ir.instance_replication_factor

    def full_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a stream's host array in a run, given the shape of one transfer.

        Leading axes for host transfers and replicas, where there are several.
        """
        return (*(n for n in (self._num_transfers, self._num_replicas) if n > 1), *shape)

    def create_outputs(self) -> dict[DeviceToHostStream, np.ndarray]:
        """Creates zero-filled host arrays for the output streams of the program."""
        return {
            s: np.zeros(self.full_shape(s.shape), s.dtype.as_numpy())
            for s in self._program.output_streams
        }

    def fetch_outputs(
        self,
        results: Mapping[DeviceToHostStream, jax.Array],
        output_arrays: Mapping[DeviceToHostStream, np.ndarray],
    ) -> None:
        """Copies the output streams of a run from the devices into the user's arrays."""
        for stream, target in output_arrays.items():
            shape = (self._num_replicas, self._num_transfers, *stream.shape)
            value = np.moveaxis(local_data(results[stream]).reshape(shape), 0, 1)
            target[...] = value.reshape(target.shape).view(target.dtype)

    def inputs_to_devices(
        self, inputs: h2dStreamBufferMaps, downcast: bool
    ) -> dict[HostToDeviceStream, jax.Array]:
        """Returns the user's input arrays as device arrays, as `Program.run` takes them.

        Raises:
            ValueError: inputs are missing, unexpected or do not fit.
        """
        expected = self._program.input_streams
        missing = [s.tensor_id for s in expected if s not in inputs]
        unexpected = [getattr(s, "tensor_id", s) for s in inputs if s not in expected]
        name = next((key for key in inputs if isinstance(key, str)), None)
        if name is not None:
            raise ValueError(
                f"run: inputs are given by stream, not by name as {name!r}: use as the key what "
                "`h2d_stream` returned, or the session's `expected_inputs()`"
            )
        if missing or unexpected:
            raise ValueError(
                f"run: missing inputs {missing}, unexpected inputs {unexpected}; the program "
                f"loads {[s.tensor_id for s in expected]}"
            )
        sharding = create_per_replica_sharding(self._program.mesh)
        out = {}
        first = (
            popdist.getInstanceIndex() * self._num_replicas if self._ir._num_processes > 1 else 0
        )
        for stream in expected:
            array = self._normalize_input(stream, inputs[stream], downcast)
            parts = device_view(np.moveaxis(array, 1, 0))
            local = dict(enumerate(parts, first))
            out[stream] = put_shards_async(local.__getitem__, parts[0], sharding)
        jax.block_until_ready(list(out.values()))  # the caller may change its arrays
        return out

    def _normalize_input(
        self, stream: HostToDeviceStream, data: HostScalarTensor, downcast: bool
    ) -> np.ndarray:
        """Returns a stream's input as (host_transfers, replicas, *shape), in the stream's dtype."""
        array = self._convert_dtype(stream, data, downcast)
        t, r = self._num_transfers, self._num_replicas
        shape = stream.shape
        leading = {(t, r), (t,) if r == 1 else (t, r), (r,) if t == 1 else (t, r),
                   () if t == r == 1 else (t, r)}  # fmt: skip
        # What has one element in each transfer may have any shape of one element.
        long = tuple(n for n in array.shape if n != 1) == tuple(n for n in (t, r) if n != 1)
        if array.shape in {(*dims, *shape) for dims in leading} or (math.prod(shape) == 1 and long):
            return array.reshape(t, r, *shape)
        raise ValueError(
            f"input {stream.tensor_id!r} has shape {array.shape}, but {(t, r, *shape)} = "
            "(host_transfers, replicas, *stream shape) is needed (dimensions equal to 1 in front "
            "may be left out)"
        )

    def _convert_dtype(
        self, stream: HostToDeviceStream, data: HostScalarTensor, downcast: bool
    ) -> np.ndarray:
        data_dtype = host_array(data).dtype
        narrow = downcast_np_dtypes.get(data_dtype, data_dtype) if downcast else data_dtype
        stream_dtype = stream.dtype.as_numpy()
        if narrow != stream_dtype and (
            hasattr(data, "dtype") or not _can_convert(narrow, stream_dtype)
        ):
            raise ValueError(
                f"input {stream.tensor_id!r} has dtype {narrow}, but the stream is {stream.dtype!r}"
            )
        try:
            return to_numpy(data, stream.dtype, copy=False)
        except ValueError as error:
            raise ValueError(f"input {stream.tensor_id!r}: {error}") from error

    def check_outputs(
        self, output_buffers: d2hStreamBufferMaps
    ) -> dict[DeviceToHostStream, np.ndarray]:
        """Checks shapes and dtypes of the user's output arrays, and returns them by stream.

        Raises:
            ValueError: one is missing or has the wrong shape or dtype.
        """
        t, r = self._num_transfers, self._num_replicas
        for s in self._program.output_streams:
            if s not in output_buffers:
                raise ValueError(f"run: no array for the output stream {s.tensor_id!r}")
            shapes = {self.full_shape(s.shape), (t, r, *s.shape)}
            if (
                output_buffers[s].shape not in shapes
                or output_buffers[s].dtype != s.dtype.as_numpy()
            ):
                raise ValueError(
                    f"the array for output stream {s.tensor_id!r} is {output_buffers[s].dtype}"
                    f"{output_buffers[s].shape}, but {s.dtype.as_numpy()}"
                    f"{self.full_shape(s.shape)} is needed"
                )
        return {s: output_buffers[s] for s in self._program.output_streams}


def _can_convert(data_dtype: np.dtype, stream_dtype: np.dtype) -> bool:
    """True if Python numbers of a type can be converted to `stream_dtype`.

    `data_dtype` is their dtype as an array.
    """
    return (data_dtype.kind, stream_dtype.kind) == ("i", "u") or np.can_cast(
        data_dtype, stream_dtype, "same_kind"
    )
