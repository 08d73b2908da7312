"""Layers whose experts are phases of their own: a group of them at a time is on the device.

A layer ends with its router. It hands on x, to which each group adds what its experts give, and
what groups read. So x has the same gradient before and after them. Each group adds to the gradients
of what it reads, before the layer's own backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import popxl
import popxl_addons as addons
from modelling.layers import Layers
from modelling.phases.alike import those_of
from modelling.phases.buffers import (
    Chain,
    Port,
    activation_buffer,
    begin_row,
    fixed_row,
    gradient_buffer,
)
from modelling.phases.grouped_experts import GroupedExperts
from modelling.phases.layer_stack import kinds_of, named, through
from modelling.phases.layout import Stage
from modelling.phases.phase import Phase
from modelling.phases.settings import Settings
from popxl_addons.transforms.batch_serialisation import RemoteHandle

ROW = popxl.TensorSpec((), popxl.int32)


class HandedOn:
    """What each layer of a phase hands to its groups of experts besides x.

    Args:
        specs: by name, of one micro-batch on one replica.
        kept: whether there is a backward pass which reads it again.
        gradient: whether the layers have a backward pass.
    """

    def __init__(
        self, specs: Mapping[str, popxl.TensorSpec], settings: Settings, kept: bool, gradient: bool
    ) -> None:
        self._specs, self._settings, self._kept = specs, settings, kept
        self._shards = settings.activation_shards
        self._values = {n: activation_buffer(spec, 1, settings) for n, spec in specs.items()}
        self._gradients = {
            n: gradient_buffer(spec, 1, settings)
            for n, spec in specs.items()
            if gradient and spec.dtype.is_floating_point
        }

    @property
    def ports(self) -> dict[str, Port]:
        """Where a layer writes it. Only the layer at work has gradients."""
        return {
            name: Port(
                spec,
                RemoteHandle(self._values[name], 0 if self._kept else None, self._shards),
                fixed_row(self._gradients[name], 0, self._shards)
                if name in self._gradients
                else None,
            )
            for name, spec in self._specs.items()
        }

    def begin_gradients(self) -> None:
        """Let the gradients be zero, before the groups of a layer add to them."""
        for buffer in self._gradients.values():
            begin_row(buffer, 0, self._settings)


def layers_and_experts(
    names: tuple[str, str],
    layers: Layers,
    group: addons.Module,
    chains: Sequence[Chain],
    others: Mapping[str, Port],
    settings: Settings,
    balances: bool,
) -> list[Stage]:
    """The stages of layers that are trained alike.

    Args:
        names: of the layers' phase, and of the phase of their experts.
        layers: `build(x, usage, *others)` returns x, usage, and what is handed on, which
            `handed_on(x)` has the specs of by name.
        group: of experts: `build(*handed on, number, seed=None)` returns what is added to x.
        chains: of x, and of the usage of experts.
        balances: whether that has a gradient.
    """
    groups = settings.config.execution.expert_groups
    trained = [settings.trains_any(name) for name in names]
    into, out = through(chains, layers, any(trained), trained[0] and balances)
    x, back = out[0], trained[0] or any(port.grad is not None for port in into)
    specs = layers.kinds[0].handed_on(x.spec)  # type: ignore[attr-defined]
    handed = HandedOn(specs, settings, kept=x.grad is not None, gradient=back)
    inputs, outputs = {**named(into), **others}, [*out, *handed.ports.values()]
    kinds = kinds_of(names[0], layers, inputs, outputs, settings)
    reads = {name: _read(port, groups) for name, port in handed.ports.items()}
    reads["number"] = Port(ROW, lambda row: row % groups)
    writes = [_added_to(x, groups)]
    phase = Phase(names[1], group, reads, writes, settings, len(layers.order) * groups)
    phase.keep_resident(settings.config.execution.resident_layers * groups)
    experts = GroupedExperts(phase, groups, handed.begin_gradients)
    return [
        replace(stage, experts=experts)
        for kind, rows in layers.runs()
        for stage in those_of(kinds[kind], rows)
    ]


def _read(port: Port, groups: int) -> Port:
    """What a layer writes, as each of its groups reads it, adding to its gradient."""
    grad = None if port.grad is None else replace(port.grad, adds=True)
    return Port(port.spec, _of_layer(port.place, groups), grad)


def _added_to(port: Port, groups: int) -> Port:
    """What a layer writes, as each of its groups adds to it."""
    grad = None if port.grad is None else _of_layer(port.grad, groups)
    return Port(port.spec, replace(_of_layer(port.place, groups), adds=True), grad)


def _of_layer(handle: RemoteHandle, groups: int) -> RemoteHandle:
    """A layer's row, for the row of one of its groups."""
    ahead = handle.row_offset
    if not isinstance(ahead, int):
        return handle

    def row_of(row: popxl.Tensor) -> popxl.Tensor:
        layer = row / groups
        return layer + ahead if ahead else layer

    return replace(handle, row_offset=row_of, grows=False)
