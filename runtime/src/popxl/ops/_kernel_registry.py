"""Registry of JAX functions that plans count as one kernel, with their FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Shapes = Sequence[tuple[int, ...]]

KERNELS: dict[str, Callable[[Shapes], int]] = {}
"""Their names in what JAX traces: the operations of their matrix products by the shapes of their
operands."""
