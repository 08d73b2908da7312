"""The part of a machine's state that loops and branches must carry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from popxl._core.effects import Effects

if TYPE_CHECKING:
    from popxl._core.functional import Functional
    from popxl._lower.machine import Machine


class LoopState:
    """The streams that the graphs use, and what their checks found, as one pytree.

    Args:
        graphs: of which one runs in each iteration.
        count: number of iterations.
    """

    def __init__(self, machine: Machine, graphs: Sequence[Functional], count: int = 1) -> None:
        effects = Effects()
        for graph in graphs:
            effects.add(graph.effects)
        self._machine = machine
        self._stores = list(effects.stores)
        self._streams = [*effects.loads, *effects.stores]
        self._checks = not machine.checks.keys().isdisjoint(effects.checks)
        self._updates, self._count = machine.updates, count
        self._step = 0 if machine.seed is None else max(graph.updates for graph in graphs)

    def snapshot(self) -> Any:
        """The state now."""
        m = self._machine
        return (
            [m.streams[s] for s in self._stores],
            [jnp.asarray(m.positions[s], jnp.int32) for s in self._streams],
            [jnp.asarray(m.fault, jnp.int32)] if self._checks else [],
        )

    def leave(self, saved: Any) -> None:
        """Make `saved`, which the last iteration left, the state."""
        self._restore(saved)
        self._machine.updates = self._updates + self._count * self._step

    def _restore(self, saved: Any) -> None:
        m = self._machine
        stores, positions, fault = saved
        m.streams.update(zip(self._stores, stores, strict=True))
        m.positions.update(zip(self._streams, positions, strict=True))
        if self._checks:
            (m.fault,) = fault

    @contextmanager
    def entered(self, saved: Any, iteration: Any = 0) -> Iterator[None]:
        """Run a body on the state `saved`; afterwards the state is as before."""
        m = self._machine
        kept = dict(m.streams), dict(m.positions), m.fault
        self._restore(saved)
        if self._step:
            at = jnp.asarray(iteration).astype(jnp.uint32)
            m.updates = self._updates + at * jnp.uint32(self._step)
        try:
            yield
        finally:
            m.streams, m.positions, m.fault = kept
            m.updates = self._updates
