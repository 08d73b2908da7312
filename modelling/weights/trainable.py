"""Which weights training changes: those that `training.trained` and `training.frozen` name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import translate
from itertools import groupby

from config.errors import ConfigError, nearest
from config.run import Training
from config.values import listed
from files.formatting import format_name
from modelling.weights.mapping import WeightMapping, is_linear
from modelling.weights.weight_map import WeightMap, without_expert_group


def mark_trainable(weight_map: WeightMap, training: Training) -> WeightMap:
    """The table whose rows say what a configuration trains.

    A pattern is a name of ours, a layer's and a path (`layer.0.self_attn.kv.weight`), or Hugging
    Face's, or the beginning of one up to a dot; `*` stands for any characters. Where a weight has
    several names, each of them means it.

    Adapters, and the modules that they name, are trained besides.

    Raises:
        ConfigError: a pattern means no weight; nothing is left to train; some weights of a variable
            are trained and others not; or a weight that is trained has an adapter.
    """
    if not training.some_frozen:
        return weight_map
    chosen, frozen = listed(training.trained), listed(training.frozen)
    names = _weights_by_name(weight_map.base)
    own = {w.name for w in weight_map.trainable_weights} if weight_map.has_adapters else set[str]()
    changed = _match_patterns(names, "training.trained", chosen or ("*",))
    changed -= _match_patterns(names, "training.frozen", frozen)
    if not changed:
        raise ConfigError("nothing is left to train: training.frozen means all that is trained")
    changed |= own
    marked = {
        layer: tuple(_mark_mapping(layer, mapping, changed) for mapping in mappings)
        for layer, mappings in weight_map.layers.items()
    }
    return replace(weight_map, layers=marked)


def _weights_by_name(weight_map: WeightMap) -> dict[str, list[str]]:
    """Each name that there is for weights, and those that it means."""
    names = {w.name: [w.name] for w in weight_map.weights}
    names |= {alias: [name] for alias, name in weight_map.hf_names.aliases.items()}
    names |= {name: joined.weights for name, joined in weight_map.hf_names.fused.items()}
    for layer, mappings in weight_map.layers.items():
        for mapping in mappings:
            own = names.setdefault(f"{without_expert_group(layer)}.{mapping.path}", [])
            own += [w.name for w in mapping.weights]
    return names


def _match_patterns(
    names: Mapping[str, Sequence[str]], field: str, patterns: Sequence[str]
) -> set[str]:
    """The weights that patterns mean."""
    meant: set[str] = set()
    for pattern in patterns:
        glob = pattern.replace("[", "[[]").replace("?", "[?]")
        matches = re.compile(f"{translate(glob)}|{translate(f'{glob}.*')}").match
        found = [name for name in names if matches(name)]
        if not found:
            close = nearest(pattern, names)
            raise ConfigError(f"{field}: {format_name(pattern, 40)} means no weight{close}")
        meant.update(weight for name in found for weight in names[name])
    return meant


def _mark_mapping(layer: str, mapping: WeightMapping, changed: Collection[str]) -> WeightMapping:
    trained = [w.name for w in mapping.weights if w.name in changed]
    frozen = [w.name for w in mapping.weights if w.name not in changed]
    if trained and frozen:
        raise ConfigError(
            f"training.trained and frozen leave {trained[0]} trained and {frozen[0]} frozen, but "
            f"they are one variable, {layer}.{mapping.path}: name both of them, or neither"
        )
    if trained and mapping.adapters:
        raise ConfigError(
            f"training.trained means {trained[0]}, which has an adapter: leave it out of one of "
            "them, such as by adapter.targets"
        )
    return replace(mapping, trainable=bool(trained))


def check_quantized_frozen(weight_map: WeightMap) -> None:
    """Raise ConfigError if a linear map of a layer is trained whole, which 4 bits do not allow."""
    for mapping in weight_map.mappings:
        if is_linear(mapping) and mapping.trainable:
            raise ConfigError(
                f"{mapping.weights[0].name} is trained whole, but model.quantisation holds it in "
                "few bits: leave one of the two out"
            )


def split_phases_by_trainable(weight_map: WeightMap) -> WeightMap:
    """The table with a phase for each run of neighbouring layers that are trained alike, with
    adapters that are alike."""

    alike = defaultdict[str, dict[str, list[object]]](dict)
    for layer, mappings in weight_map.layers.items():
        how: list[object] = [
            (mapping.trainable, [a.graph_key for a in mapping.adapters]) for mapping in mappings
        ]
        alike[without_expert_group(layer)][layer] = how
    for whole, of_parts in alike.items():
        groups = [how for layer, how in of_parts.items() if layer != whole]
        if any(how != groups[0] for how in groups):
            raise ConfigError(
                f"some experts of {whole} are trained and others not, but they are one variable: "
                "name all of them, or none"
            )

    def key(layer: str) -> list[object]:
        return list(alike[without_expert_group(layer)].values())

    phases: dict[str, tuple[str, ...]] = {}
    phase_splits: dict[str, list[str]] = {}
    for phase, layers in weight_map.phases.items():
        parts = [tuple(members) for _, members in groupby(layers, key)] or [()]
        names = [phase, *(f"{phase}_from_{_layer_index(part[0])}" for part in parts[1:])]
        phases |= dict(zip(names, parts, strict=True))
        phase_splits[phase] = names
    return replace(weight_map, phases=phases, phase_splits=phase_splits)


def _layer_index(layer: str) -> str:
    return without_expert_group(layer).rpartition(".")[2]
