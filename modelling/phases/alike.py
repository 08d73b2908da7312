"""Phases of layers that are alike, of which some may keep their activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import popxl_addons as addons
from modelling.phases.buffers import Port
from modelling.phases.layout import Stage
from modelling.phases.phase import LastLayers, Phase
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
) -> list[Stage]:
    """A phase for all layers or, where some keep their activations and others compute them again,
    two with the same variables. The last layers keep theirs: those wait the shortest time for the
    backward pass.

    Args:
        module, inputs, outputs, shared, weights_of: see `Phase`.

    Returns:
        The stages of all layers, in order.
    """
    kept = settings.layers_kept(name, layers)
    others = layers - kept

    def phase(title: str, keeper: Phase | None, last: LastLayers | None = None) -> Phase:
        return Phase(title, module, inputs, outputs, settings, layers, shared, keeper, last)

    first = phase(name, weights_of)
    if not kept or not others:
        return [Stage(first, range(layers))]
    keeping = phase(f"{name}_kept", weights_of or first, LastLayers(others, name))
    return [Stage(first, range(others)), Stage(keeping, range(others, layers))]


def those_of(stages: Sequence[Stage], rows: range) -> list[Stage]:
    """The stages of some neighbouring layers alone."""
    cut = [
        replace(stage, rows=range(max(own.start, rows.start), min(own.stop, rows.stop)))
        for stage in stages
        for own in (stage.rows,)
    ]
    return [stage for stage in cut if stage.rows]
