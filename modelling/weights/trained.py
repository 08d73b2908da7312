"""Which weights training changes: those that `training.trained` and `training.frozen` name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import translate
from itertools import chain, groupby

from config.errors import ConfigError, nearest
from config.run import Training
from config.values import listed
from files.shown import shown_name
from modelling.weights.row import WeightRow
from modelling.weights.table import WeightTable


def with_trained(table: WeightTable, training: Training) -> WeightTable:
    """The table whose rows say what a configuration trains.

    A pattern is a name of ours, a layer's and a path (`layer.0.attention.q.weight`), or Hugging
    Face's, or the beginning of one up to a dot; `*` stands for any characters. Where a weight has
    several names, each of them means it.

    Raises:
        ConfigError: a pattern means no weight; nothing is left to train; or some weights of a
            variable are trained and others not.
    """
    if not training.some_frozen:
        return table
    chosen, frozen = listed(training.trained), listed(training.frozen)
    names = _names(table)
    changed = {w.name for w in table.trained}
    if chosen:
        changed = _meant(names, "training.trained", chosen)
    changed -= _meant(names, "training.frozen", frozen)
    if not changed:
        raise ConfigError("nothing is left to train: training.frozen means all that is trained")
    marked = {
        layer: tuple(_marked(layer, row, changed) for row in rows)
        for layer, rows in table.layers.items()
    }
    return cut_by_trained(replace(table, layers=marked))


def _names(table: WeightTable) -> dict[str, list[str]]:
    """Each name that there is for weights, and those that it means."""
    names = {w.name: [w.name] for w in table.weights}
    names |= {alias: [name] for alias, name in table.aliases.items()}
    names |= {fused: list(parts) for fused, parts in table.fused.items()}
    names |= {stacked: list(chain(*parts)) for stacked, parts in table.stacked.items()}
    for layer, rows in table.layers.items():
        names |= {f"{layer}.{row.path}": [w.name for w in row.weights] for row in rows}
    return names


def _meant(names: Mapping[str, Sequence[str]], field: str, patterns: Sequence[str]) -> set[str]:
    """The weights that patterns mean."""
    meant: set[str] = set()
    for pattern in patterns:
        glob = pattern.replace("[", "[[]").replace("?", "[?]")
        matches = re.compile(f"{translate(glob)}|{translate(f'{glob}.*')}").match
        found = [name for name in names if matches(name)]
        if not found:
            close = nearest(pattern, names)
            raise ConfigError(f"{field}: {shown_name(pattern, 40)} means no weight{close}")
        meant.update(weight for name in found for weight in names[name])
    return meant


def _marked(layer: str, row: WeightRow, changed: Collection[str]) -> WeightRow:
    trained = [w.name for w in row.weights if w.name in changed]
    frozen = [w.name for w in row.weights if w.name not in changed]
    if trained and frozen:
        raise ConfigError(
            f"training.trained and frozen leave {trained[0]} trained and {frozen[0]} frozen, but "
            f"they are one variable, {layer}.{row.path}: name both of them, or neither"
        )
    return replace(row, trained=bool(trained))


def cut_by_trained(table: WeightTable) -> WeightTable:
    """The table with a phase for each run of neighbouring layers that are trained alike."""
    phases: dict[str, tuple[str, ...]] = {}
    runs: dict[str, list[str]] = {}
    for phase, layers in table.phases.items():
        by_trained = groupby(layers, lambda name: [row.trained for row in table.layers[name]])
        parts = [tuple(members) for _, members in by_trained] or [()]
        names = [phase, *(f"{phase}_from_{part[0].rpartition('.')[2]}" for part in parts[1:])]
        phases |= dict(zip(names, parts, strict=True))
        runs[phase] = names
    return replace(table, phases=phases, runs=runs)
