"""Loads and stores of remote-buffer entries."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from popxl import context
from popxl._analysis.effects import Effects
from popxl._ir.argument_checks import check_integer, check_type
from popxl._ir.op_registry import NoGrad, define
from popxl.errors import SpecError
from popxl.ops._args import check_tensors
from popxl.ops._emit import emit
from popxl.ops._index_bounds import check_constant_indices
from popxl.remote_buffer import RemoteBuffer
from popxl.tensor import Tensor, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from popxl._analysis.functionalization import Node
    from popxl._analysis.tracer_protocol import TracerProtocol


def _entry_spec(*specs: TensorSpec, buffer: RemoteBuffer, **_: Any) -> list[TensorSpec]:
    return [TensorSpec(buffer.tensor_shape, buffer.tensor_dtype, buffer.meta_shape)]


def _raise_not_on_host(tracer: TracerProtocol, node: Node, arrays: Sequence[Any]) -> Sequence[Any]:
    """Placeholder lowering that raises: transfers are steps of the host's schedule."""
    raise AssertionError(f"{node} is in a segment")


REMOTE_LOAD = define(
    "remote_load",
    execute=_raise_not_on_host,
    infer=_entry_spec,
    grad=NoGrad("remote buffers are state"),
    effects=lambda op: Effects(reads={op.attrs["buffer"]: None}),
    tags=("host",),
    result="{t}_remote_loaded",
)
REMOTE_STORE = define(
    "remote_store",
    execute=_raise_not_on_host,
    infer=lambda *specs, **_: [],
    grad=NoGrad("remote buffers are state"),
    effects=lambda op: Effects(writes={op.attrs["buffer"]: None}, reads={op.attrs["buffer"]: None}),
    tags=("host",),
)


def _checked_inputs(
    op: str, remote_buffer: RemoteBuffer, offset: int | Tensor, *stored: Tensor
) -> tuple[list[Tensor], dict[str, Any]]:
    check_tensors(op, *stored)
    check_type(op, "remote_buffer", remote_buffer, RemoteBuffer)
    if remote_buffer._ir is not context.get_ir():
        raise ValueError(f"{op}: {remote_buffer!r} belongs to another Ir than the current graph")
    for t in stored:
        remote_buffer.validate_tensor_matches_buffer(t)
    if isinstance(offset, Tensor):
        if offset.nelms != 1 or not offset.dtype.is_int:
            raise SpecError(
                f"{op} at {context.get_source_location()}: the offset must be one integer, but "
                f"{offset.id!r} is {offset.dtype.name}{list(offset.shape)}"
            )
        check_constant_indices(op, offset, remote_buffer.entries)
        return [offset], {"buffer": remote_buffer, "offset": None}
    at = check_integer(op, "offset", offset, 0)
    if at >= remote_buffer.entries:
        raise ValueError(
            f"{op}: offset {at} is outside the remote buffer's {remote_buffer.entries} entries"
        )
    return [], {"buffer": remote_buffer, "offset": at}


def remote_load(
    remote_buffer: RemoteBuffer, offset: int | Tensor, name: str | None = None
) -> Tensor:
    """Loads an entry of a remote buffer into a new tensor.

    Args:
        offset: index of the entry: an int or an integer tensor of one element.
        name: the result is called `<name>_remote_loaded`.

    Returns:
        A tensor of the buffer's entry shape and dtype, and its meta_shape.

    Raises:
        ValueError: the offset is out of range.
        IndexError: the offset is a constant tensor that is out of range.
    """
    tensors, attrs = _checked_inputs("remote_load", remote_buffer, offset)
    name = name or f"buffer_{remote_buffer.remote_buffer_id}"
    return emit(REMOTE_LOAD, tensors, attrs, names=[f"{name}_remote_loaded"])[0]


def remote_load_(remote_buffer: RemoteBuffer, offset: int | Tensor, t: Tensor) -> Tensor:
    """Loads a remote-buffer entry, overwriting `t`, which must have its shape and dtype."""
    tensors, attrs = _checked_inputs("remote_load_", remote_buffer, offset, t)
    return emit(REMOTE_LOAD, [t, *tensors], attrs, inplace=0)[0]


def remote_store(remote_buffer: RemoteBuffer, offset: int | Tensor, t: Tensor) -> None:
    """Stores `t` as an entry of a remote buffer.

    Raises:
        ValueError: the offset is out of range, or `t` does not match the entries.
        IndexError: the offset is a constant tensor that is out of range.
    """
    tensors, attrs = _checked_inputs("remote_store", remote_buffer, offset, t)
    emit(REMOTE_STORE, [t, *tensors], attrs)


def multiply_tuple(tup: tuple[int, ...]) -> int:
    """Returns the product of the integers in a tuple."""
    return math.prod(tup)
