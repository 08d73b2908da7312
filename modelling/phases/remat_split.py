"""The stages of layers that are alike, of which some may keep their activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from modelling.phases.phase import Phase
from modelling.phases.phase_plan import PhaseRun


def split_by_remat(phase: Phase) -> list[PhaseRun]:
    """All layers of a phase, in order. Where some keep their activations and others compute them
    again, those that keep them are the last: theirs wait the shortest time for the backward pass.
    """
    again = phase.entries - phase.saved_layers
    if not again or not phase.saved_layers:
        return [PhaseRun(phase, range(phase.entries))]
    return [
        PhaseRun(phase, range(again)),
        PhaseRun(phase.saved_tail(), range(again, phase.entries)),
    ]


def slice_runs(runs: Sequence[PhaseRun], rows: range) -> list[PhaseRun]:
    """The stages of some neighbouring layers alone."""
    cut = [
        replace(run, rows=range(max(own.start, rows.start), min(own.stop, rows.stop)))
        for run in runs
        for own in (run.rows,)
    ]
    return [run for run in cut if run.rows]
