"""Splits a phase's layers into recomputed ones and ones that save activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from modelling.phases.phase import Phase
from modelling.phases.phase_plan import PhaseRun


def split_by_remat(phase: Phase) -> list[PhaseRun]:
    """Split a phase's layers into a run that recomputes, then a run that saves activations.

    The last layers save their activations, because these wait the shortest time for the backward
    pass.
    """
    recomputed = phase.num_layers - phase.num_saved_layers
    if not recomputed or not phase.num_saved_layers:
        return [PhaseRun(phase, range(phase.num_layers))]
    return [
        PhaseRun(phase, range(recomputed)),
        PhaseRun(phase.build_saved_layers_phase(), range(recomputed, phase.num_layers)),
    ]


def slice_runs(runs: Sequence[PhaseRun], rows: range) -> list[PhaseRun]:
    """Restrict runs of layers to the indices in `rows`; runs that become empty are dropped."""
    sliced = [
        replace(run, rows=range(max(run.rows.start, rows.start), min(run.rows.stop, rows.stop)))
        for run in runs
    ]
    return [run for run in sliced if run.rows]
