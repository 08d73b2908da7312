"""Selection of the weights to train, from `training.trainable` and `training.frozen`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import translate
from itertools import groupby

from config.errors import ConfigError, did_you_mean
from config.training import Training
from config.values import split_names
from files.formatting import format_name
from modelling.weights.weight_map import WeightMap, without_expert_group
from modelling.weights.weight_mapping import WeightMapping, is_linear


def mark_trainable(weight_map: WeightMap, training: Training) -> WeightMap:
    """Mark the weight mappings that a configuration trains as trainable, all others as frozen.

    A pattern matches names of weights, or their beginning up to a dot; `*` matches any characters.
    The names are this program's, a layer and a path (`layer.0.self_attn.kv.weight`), and all names
    that Hugging Face's files have. Adapters and `adapter.modules_to_save` are trainable, too.

    Raises:
        ConfigError: a pattern matches no weight; no weight is left to train; a variable has both
            trainable and frozen weights; or a trainable weight has an adapter.
    """
    if not training.has_frozen_weights:
        return weight_map
    patterns, frozen = split_names(training.trainable), split_names(training.frozen)
    names = _weights_by_name(weight_map.without_adapters)
    trainable = _match_patterns(names, "training.trainable", patterns or ("*",))
    trainable -= _match_patterns(names, "training.frozen", frozen)
    if not trainable:
        raise ConfigError("nothing is left to train: training.frozen matches all trainable weights")
    if weight_map.has_adapters:
        trainable |= {w.name for w in weight_map.trainable_weights}
    layers = {
        layer: tuple(_mark_mapping(layer, mapping, trainable) for mapping in mappings)
        for layer, mappings in weight_map.layers.items()
    }
    return replace(weight_map, layers=layers)


def _weights_by_name(weight_map: WeightMap) -> dict[str, list[str]]:
    """Map each name that users can give (weight, module or layer) to the weights it means."""
    names = {w.name: [w.name] for w in weight_map.weights}
    names |= {alias: [name] for alias, name in weight_map.hf_names.aliases.items()}
    names |= {name: fused.weight_names for name, fused in weight_map.hf_names.fused.items()}
    for layer, mappings in weight_map.layers.items():
        for mapping in mappings:
            weights = names.setdefault(f"{without_expert_group(layer)}.{mapping.path}", [])
            weights += [w.name for w in mapping.weights]
    return names


def _match_patterns(
    names: Mapping[str, Sequence[str]], field: str, patterns: Sequence[str]
) -> set[str]:
    """Names of the weights that match any pattern of a config field."""
    weights: set[str] = set()
    for pattern in patterns:
        glob = pattern.replace("[", "[[]").replace("?", "[?]")
        matches = re.compile(f"{translate(glob)}|{translate(f'{glob}.*')}").match
        matching = [name for name in names if matches(name)]
        if not matching:
            close = did_you_mean(pattern, names)
            raise ConfigError(f"{field}: {format_name(pattern, 40)} matches no weight{close}")
        weights.update(weight for name in matching for weight in names[name])
    return weights


def _mark_mapping(layer: str, mapping: WeightMapping, trainable: Collection[str]) -> WeightMapping:
    """Mark a weight mapping as trainable if its weights are in `trainable`, else as frozen."""
    trained = [w.name for w in mapping.weights if w.name in trainable]
    frozen = [w.name for w in mapping.weights if w.name not in trainable]
    if trained and frozen:
        raise ConfigError(
            f"training.trainable and frozen leave {trained[0]} trained and {frozen[0]} frozen, but "
            f"they are one variable, {layer}.{mapping.path}: name both of them, or neither"
        )
    if trained and mapping.adapters:
        raise ConfigError(
            f"training.trainable matches {trained[0]}, which has an adapter: leave it out of one "
            "of them, such as by adapter.targets"
        )
    return replace(mapping, trainable=bool(trained))


def check_quantized_frozen(weight_map: WeightMap) -> None:
    """Raise ConfigError if a linear layer is trainable although weights are quantized."""
    for mapping in weight_map.mappings:
        if is_linear(mapping) and mapping.trainable:
            raise ConfigError(
                f"{mapping.weights[0].name} is trainable, but model.quantization quantizes it: "
                "leave one of the two out"
            )


def split_phases_by_trainable(weight_map: WeightMap) -> WeightMap:
    """Split phases so that a phase's layers have equal trainable weights and adapters."""
    keys = defaultdict[str, dict[str, list[object]]](dict)  # by layer, of it and of its experts
    for layer, mappings in weight_map.layers.items():
        key: list[object] = [
            (mapping.trainable, [a.graph_key for a in mapping.adapters]) for mapping in mappings
        ]
        keys[without_expert_group(layer)][layer] = key
    for layer, keys_of_layer in keys.items():
        groups = [key for name, key in keys_of_layer.items() if name != layer]
        if any(key != groups[0] for key in groups):
            raise ConfigError(
                f"some experts of {layer} are trained and others not, but they are one variable: "
                "name all of them, or none"
            )

    def trainable_keys(layer: str) -> list[object]:
        return list(keys[without_expert_group(layer)].values())

    phases: dict[str, tuple[str, ...]] = {}
    phase_splits: dict[str, list[str]] = {}
    for phase, layers in weight_map.phases.items():
        runs = [tuple(members) for _, members in groupby(layers, trainable_keys)] or [()]
        names = [phase, *(f"{phase}_from_{_layer_index(run[0])}" for run in runs[1:])]
        phases |= dict(zip(names, runs, strict=True))
        phase_splits[phase] = names
    return replace(weight_map, phases=phases, phase_splits=phase_splits)


def _layer_index(layer: str) -> str:
    """Layer index in the name of a layer or of one of its expert groups."""
    return without_expert_group(layer).rpartition(".")[2]
