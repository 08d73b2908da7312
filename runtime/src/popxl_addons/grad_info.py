"""Construction of `GradGraphInfo`: the forward tensors that a gradient graph's inputs stand for."""

from __future__ import annotations

from collections.abc import Iterable

import popxl
from popxl.transforms import ExpectedConnection, ExpectedConnectionType, GradGraphInfo

Connection = tuple[popxl.Tensor, ExpectedConnectionType]


def fwd(t: popxl.Tensor) -> Connection:
    """Return a connection: the gradient graph's input or output stands for forward tensor `t`."""
    return t, ExpectedConnectionType.Fwd


def fwd_grad(t: popxl.Tensor) -> Connection:
    """Return a connection: the gradient graph's input or output stands for the gradient of `t`."""
    return t, ExpectedConnectionType.FwdGrad


def is_fwd(connection: ExpectedConnection) -> bool:
    """True if a connection stands for a forward tensor; false if for the gradient of one."""
    return connection.connection_type is ExpectedConnectionType.Fwd


def make_grad_graph_info(
    graph: popxl.Graph,
    forward: popxl.Graph,
    inputs: Iterable[Connection | ExpectedConnection],
    outputs: Iterable[Connection | ExpectedConnection],
) -> GradGraphInfo:
    """Create a gradient graph's `GradGraphInfo`, which connects it to the graph `forward`.

    Args:
        graph: the gradient graph. It may have further inputs after the expected ones.
        inputs: for each of its first inputs in order.
        outputs: for each of its outputs in order.
    """
    return GradGraphInfo._make(
        graph,
        forward,
        tuple(map(_to_expected_connection, inputs)),
        tuple(map(_to_expected_connection, outputs)),
    )


def _to_expected_connection(c: Connection | ExpectedConnection) -> ExpectedConnection:
    return c if isinstance(c, ExpectedConnection) else ExpectedConnection._make(*c)
