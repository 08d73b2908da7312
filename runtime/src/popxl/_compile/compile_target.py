"""Protocol of a program that the compiler takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from popxl._compile.platforms import Platform
    from popxl._schedule.segment import Segment
    from popxl.ir import Ir


class CompileTarget(Protocol):
    """Ir, mesh and platform of a program; implemented by `popxl._run.program.Program`."""

    ir: Ir
    mesh: Mesh
    platform: Platform

    def specs_of(self, segment: Segment) -> tuple[list[Any], list[Any]]:
        """Returns the `ShapeDtypeStruct`s, with shardings, of a segment's arguments and results."""
