"""What an op can ask of the machine that executes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from popxl._analysis.functionalization import FunctionalGraph
    from popxl.streams import Stream


class TracerProtocol(Protocol):
    """Runs functional graphs while JAX traces a segment, and holds what ops touch by themselves."""

    def run(self, graph: FunctionalGraph, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of a graph."""

    def host_load(self, stream: Stream) -> Any:
        """The next transfer of a host-to-device stream."""

    def host_store(self, stream: Stream, value: Any) -> None:
        """Append to a device-to-host stream."""
