"""Protocol of the tracer that loop, branch and host-exchange ops use when lowered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from popxl._analysis.functionalization import FunctionalGraph
    from popxl.streams import Stream


class TracerProtocol(Protocol):
    """Interface of `popxl._compile.lower_to_jax.SegmentTracer` that ops use."""

    def run_graph(self, graph: FunctionalGraph, inputs: Sequence[Any]) -> list[Any]:
        """Returns the outputs of a graph for given inputs."""

    def host_load(self, stream: Stream) -> Any:
        """Returns the next transfer of a host-to-device stream."""

    def host_store(self, stream: Stream, value: Any) -> None:
        """Appends a value to the transfers of a device-to-host stream."""
