"""The stages of layers that are alike, of which some may keep their activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from modelling.phases.layout import Stage
from modelling.phases.phase import Phase


def layers_alike(phase: Phase) -> list[Stage]:
    """All layers of a phase, in order. Where some keep their activations and others compute them
    again, those that keep them are the last: theirs wait the shortest time for the backward pass.
    """
    again = phase.entries - phase.kept
    if not again or not phase.kept:
        return [Stage(phase, range(phase.entries))]
    return [
        Stage(phase, range(again)),
        Stage(phase.keeping(), range(again, phase.entries)),
    ]


def those_of(stages: Sequence[Stage], rows: range) -> list[Stage]:
    """The stages of some neighbouring layers alone."""
    cut = [
        replace(stage, rows=range(max(own.start, rows.start), min(own.stop, rows.stop)))
        for stage in stages
        for own in (stage.rows,)
    ]
    return [stage for stage in cut if stage.rows]
