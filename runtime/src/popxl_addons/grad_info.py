"""Construction of `GradGraphInfo` for gradient graphs that this package's transforms make."""

from __future__ import annotations

from collections.abc import Iterable

import popxl
from popxl.transforms import ExpectedConnection, ExpectedConnectionType, GradGraphInfo

Connection = tuple[popxl.Tensor, ExpectedConnectionType]


def fwd(t: popxl.Tensor) -> Connection:
    """Return a connection to a tensor of the forward graph."""
    return t, ExpectedConnectionType.Fwd


def fwd_grad(t: popxl.Tensor) -> Connection:
    """Return a connection to the gradient of a forward tensor."""
    return t, ExpectedConnectionType.FwdGrad


def is_fwd(connection: ExpectedConnection) -> bool:
    """True if a connection is to a forward tensor; false if it is to its gradient."""
    return connection.connection_type is ExpectedConnectionType.Fwd


def make_grad_graph_info(
    graph: popxl.Graph,
    forward: popxl.Graph,
    inputs: Iterable[Connection | ExpectedConnection],
    outputs: Iterable[Connection | ExpectedConnection],
) -> GradGraphInfo:
    """Create the `GradGraphInfo` of a gradient graph of the graph `forward`.

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
