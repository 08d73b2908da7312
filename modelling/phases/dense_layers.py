"""Layers that are trained alike: a phase for each kind, along the chains of what they hand on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from modelling.layers import LayerModules
from modelling.phases.buffers import ActivationRows, LayerIO
from modelling.phases.phase import Phase
from modelling.phases.phase_plan import PhaseRun
from modelling.phases.remat_split import slice_runs, split_by_remat
from modelling.phases.settings import PhaseSettings

LayerIOs = tuple[LayerIO, ...]


def by_name(layer_ios: Iterable[LayerIO]) -> dict[str, LayerIO]:
    """The values that layers hand on, by name: x, and the usage of experts."""
    return dict(zip(("x", "usage"), layer_ios, strict=False))


def reserve_rows(
    chains: Sequence[ActivationRows], layers: LayerModules, trained: bool, usage_is_trained: bool
) -> tuple[LayerIOs, LayerIOs]:
    """Where layers read, and where they write.

    Args:
        chains: of x, and of the usage of experts.
        trained: whether there is something trained that x goes through, as the usage does if
            `usage_is_trained`.
    """
    count = len(layers.type_of_layer)
    passed = zip(chains, (trained, usage_is_trained), strict=False)
    into, out = zip(*(chain.reserve(count, it) for chain, it in passed), strict=True)
    return into, out


def build_runs_by_type(
    name: str,
    layers: LayerModules,
    inputs: Mapping[str, LayerIO],
    outputs: Sequence[LayerIO],
    settings: PhaseSettings,
) -> list[list[PhaseRun]]:
    """The stages of all layers as if they were of a kind, for each kind."""
    kinds: list[list[PhaseRun]] = []
    for number, module in enumerate(layers.modules):
        title = f"{name}_{number + 1}" if number else name
        keeper = kinds[0][0].phase if kinds else None  # it has the weights of all layers
        given = inputs, outputs, settings, len(layers.type_of_layer)
        kinds.append(split_by_remat(Phase(title, module, *given, share_weights_with=keeper)))
    return kinds


def build_dense_runs(
    name: str,
    layers: LayerModules,
    chains: Sequence[ActivationRows],
    others: Mapping[str, LayerIO],
    settings: PhaseSettings,
    balances: bool,
) -> list[PhaseRun]:
    """The stages of whole layers, in order.

    Args:
        others: what they read besides.
        balances: whether the usage of experts has a gradient.
    """
    trained = settings.is_phase_trainable(name)
    into, out = reserve_rows(chains, layers, trained, trained and balances)
    kinds = build_runs_by_type(name, layers, {**by_name(into), **others}, out, settings)
    return [
        run for kind, rows in layers.runs_of_one_type() for run in slice_runs(kinds[kind], rows)
    ]
