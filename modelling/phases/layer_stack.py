"""Layers that are trained alike: a phase for each kind, along the chains of what they hand on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from modelling.layers import Layers
from modelling.phases.alike import layers_alike, those_of
from modelling.phases.buffers import Chain, Port
from modelling.phases.layout import Stage
from modelling.phases.phase import Phase
from modelling.phases.settings import Settings

Ports = tuple[Port, ...]


def named(ports: Iterable[Port]) -> dict[str, Port]:
    """The values that layers hand on, by name: x, and the usage of experts."""
    return dict(zip(("x", "usage"), ports, strict=False))


def through(
    chains: Sequence[Chain], layers: Layers, trained: bool, usage_is_trained: bool
) -> tuple[Ports, Ports]:
    """Where layers read, and where they write.

    Args:
        chains: of x, and of the usage of experts.
        trained: whether there is something trained that x goes through, as the usage does if
            `usage_is_trained`.
    """
    count = len(layers.order)
    passed = zip(chains, (trained, usage_is_trained), strict=False)
    into, out = zip(*(chain.through(count, it) for chain, it in passed), strict=True)
    return into, out


def kinds_of(
    name: str,
    layers: Layers,
    inputs: Mapping[str, Port],
    outputs: Sequence[Port],
    settings: Settings,
) -> list[list[Stage]]:
    """The stages of all layers as if they were of a kind, for each kind."""
    kinds: list[list[Stage]] = []
    for number, module in enumerate(layers.kinds):
        title = f"{name}_{number + 1}" if number else name
        keeper = kinds[0][0].phase if kinds else None  # it has the weights of all layers
        given = inputs, outputs, settings, len(layers.order)
        kinds.append(layers_alike(Phase(title, module, *given, weights_of=keeper)))
    return kinds


def layers_alone(
    name: str,
    layers: Layers,
    chains: Sequence[Chain],
    others: Mapping[str, Port],
    settings: Settings,
    balances: bool,
) -> list[Stage]:
    """The stages of whole layers, in order.

    Args:
        others: what they read besides.
        balances: whether the usage of experts has a gradient.
    """
    trained = settings.trains_any(name)
    into, out = through(chains, layers, trained, trained and balances)
    kinds = kinds_of(name, layers, {**named(into), **others}, out, settings)
    return [stage for kind, rows in layers.runs() for stage in those_of(kinds[kind], rows)]
