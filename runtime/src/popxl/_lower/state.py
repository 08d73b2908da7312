"""The part of a machine's state that loops and branches must carry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from popxl._core.effects import Effects, graph_effects

if TYPE_CHECKING:
    from popxl._lower.machine import Machine
    from popxl.graph import Graph


class LoopState:
    """The buffers that the graphs write, the streams they use, and what their checks found, as one
    pytree."""

    def __init__(self, machine: Machine, graphs: Sequence[Graph]) -> None:
        effects = Effects()
        for graph in graphs:
            effects.add(graph_effects(graph))
        self._machine = machine
        self._buffers = list(effects.writes)
        self._stores = list(effects.stores)
        self._streams = [*effects.loads, *effects.stores]
        self._checks = not machine.checks.keys().isdisjoint(effects.checks)

    def snapshot(self) -> Any:
        """The state now."""
        m = self._machine
        return (
            [m.buffers[b] for b in self._buffers],
            [m.streams[s] for s in self._stores],
            [jnp.asarray(m.positions[s], jnp.int32) for s in self._streams],
            [jnp.asarray(m.fault, jnp.int32)] if self._checks else [],
        )

    def restore(self, saved: Any) -> None:
        """Make `saved` the state."""
        m = self._machine
        buffers, stores, positions, fault = saved
        m.buffers.update(zip(self._buffers, buffers, strict=True))
        m.streams.update(zip(self._stores, stores, strict=True))
        m.positions.update(zip(self._streams, positions, strict=True))
        if self._checks:
            (m.fault,) = fault

    @contextmanager
    def entered(self, saved: Any) -> Iterator[None]:
        """Run a body on the state `saved`; afterwards the state is as before."""
        m = self._machine
        kept = dict(m.buffers), dict(m.streams), dict(m.positions), m.fault
        self.restore(saved)
        try:
            yield
        finally:
            m.buffers, m.streams, m.positions, m.fault = kept
