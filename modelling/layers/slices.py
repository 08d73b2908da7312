"""What loops over slices of an axis have in common."""

from __future__ import annotations

from collections.abc import Sequence

import popxl_addons as addons
from popxl import Tensor, TensorSpec, ops


def slice_of(t: Tensor, start: Tensor, size: int, axis: int) -> Tensor:
    """The slice of `size` that begins at `start`."""
    return ops.dynamic_slice(t, start, [axis], [size], no_overlap=True)


def with_slice(t: Tensor, start: Tensor, part: Tensor, axis: int) -> Tensor:
    """`t` with another slice from `start` on."""
    return ops.dynamic_update(t, start, part, [axis], [part.shape[axis]], no_overlap=True)


def sliced_spec(t: Tensor, size: int, axis: int) -> TensorSpec:
    """The spec of a slice."""
    return TensorSpec((*t.shape[:axis], size, *t.shape[axis + 1 :]), t.dtype)


def forward_values(
    gradient: addons.GraphWithNamedArgs, values: Sequence[Tensor]
) -> dict[Tensor, Tensor]:
    """By input of a recomputing gradient graph: the values of the forward graph's inputs."""
    info = gradient.grad_graph_info
    by_input = dict(zip(info.forward_graph.inputs, values, strict=True))
    expected = zip(info.graph.inputs, info.expected_inputs, strict=True)
    return {t: by_input[c.fwd_tensor] for t, c in expected if c.fwd_tensor in by_input}
