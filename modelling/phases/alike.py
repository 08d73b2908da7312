"""Phases of layers that are alike, of which some may keep their activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import popxl_addons as addons
from modelling.phases.buffers import Port
from modelling.phases.phase import Phase
from modelling.phases.settings import Settings


def layers_alike(
    name: str,
    module: addons.Module,
    inputs: Mapping[str, Port],
    outputs: Sequence[Port],
    settings: Settings,
    layers: int,
    shared: Mapping[str, Phase] | None = None,
    weights_of: Phase | None = None,
) -> list[tuple[Phase, range]]:
    """A phase for all layers or, where some keep their activations and others compute them again,
    two with the same variables. The last layers keep theirs: those wait the shortest time for the
    backward pass.

    Args:
        module, inputs, outputs, shared, weights_of: see `Phase`.

    Returns:
        Phases and the layers that each is for, in order.
    """
    kept = settings.layers_kept(name, layers)
    others = layers - kept

    def phase(title: str, keeps: bool, first: int, keeper: Phase | None) -> Phase:
        return Phase(
            title, module, inputs, outputs, settings, layers, shared, keeper, keeps, first
        )

    if not kept or not others:
        return [(phase(name, kept > 0, 0, weights_of), range(layers))]
    again = phase(name, False, 0, weights_of)
    keeping = phase(f"{name}_kept", True, others, weights_of or again)
    return [(again, range(others)), (keeping, range(others, layers))]
