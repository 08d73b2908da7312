"""Protocol of the JAX tracer that loop, branch and host-exchange ops call when lowered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from popxl._analysis.functionalization import FunctionalGraph
    from popxl.streams import Stream


class TracerProtocol(Protocol):
    """Methods of `popxl._compile.lower_to_jax.SegmentTracer` that ops call when lowered."""

    def run_graph(self, graph: FunctionalGraph, inputs: Sequence[Any]) -> list[Any]:
        """Returns the traced outputs of a graph for given inputs."""

    def host_load(self, stream: Stream) -> Any:
        """Returns the next transfer of a host-to-device stream, while a segment is traced."""

    def host_store(self, stream: Stream, value: Any) -> None:
        """Appends a traced value to the transfers of a device-to-host stream."""
