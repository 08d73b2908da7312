"""Protocol of the tracer that structural ops use while they are lowered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from popxl._analysis.functionalization import FunctionalGraph
    from popxl.streams import Stream


class TracerProtocol(Protocol):
    """Interface of `popxl._compile.lower_to_jax.SegmentTracer` for ops."""

    def run(self, graph: FunctionalGraph, inputs: Sequence[Any]) -> list[Any]:
        """Returns the outputs of a graph."""

    def host_load(self, stream: Stream) -> Any:
        """Returns the next transfer of a host-to-device stream."""

    def host_store(self, stream: Stream, value: Any) -> None:
        """Appends to a device-to-host stream."""
