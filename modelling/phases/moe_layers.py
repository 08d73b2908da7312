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
from modelling.layers import LayerModules
from modelling.phases.buffers import (
    ActivationRows,
    LayerIO,
    activation_buffer,
    fixed_row,
    gradient_buffer,
    zero_row,
)
from modelling.phases.dense_layers import build_runs_by_type, by_name, reserve_rows
from modelling.phases.phase import Phase
from modelling.phases.phase_plan import PhaseRun
from modelling.phases.remat_split import slice_runs
from modelling.phases.settings import PhaseSettings
from modelling.phases.streamed_experts import StreamedExperts
from popxl_addons.transforms.batch_serialisation import RemoteHandle

ROW = popxl.TensorSpec((), popxl.int32)


class ExpertInputs:
    """What each layer of a phase hands to its groups of experts besides x.

    Args:
        specs: by name, of one micro-batch on one replica.
        kept: whether there is a backward pass which reads it again.
        gradient: whether the layers have a backward pass.
    """

    def __init__(
        self,
        specs: Mapping[str, popxl.TensorSpec],
        settings: PhaseSettings,
        kept: bool,
        gradient: bool,
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
    def layer_ios(self) -> dict[str, LayerIO]:
        """Where a layer writes it. Only the layer at work has gradients."""
        return {
            name: LayerIO(
                spec,
                RemoteHandle(self._values[name], 0 if self._kept else None, self._shards),
                fixed_row(self._gradients[name], 0, self._shards)
                if name in self._gradients
                else None,
            )
            for name, spec in self._specs.items()
        }

    def zero_grads(self) -> None:
        """Let the gradients be zero, before the groups of a layer add to them."""
        for buffer in self._gradients.values():
            zero_row(buffer, 0, self._settings)


def build_moe_runs(
    names: tuple[str, str],
    layers: LayerModules,
    group: addons.Module,
    chains: Sequence[ActivationRows],
    others: Mapping[str, LayerIO],
    settings: PhaseSettings,
    balances: bool,
) -> list[PhaseRun]:
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
    trained = [settings.is_phase_trainable(name) for name in names]
    into, out = reserve_rows(chains, layers, any(trained), trained[0] and balances)
    x, back = out[0], trained[0] or any(layer_io.grad is not None for layer_io in into)
    specs = layers.modules[0].expert_input_specs(x.spec)  # type: ignore[attr-defined]
    handed = ExpertInputs(specs, settings, kept=x.grad is not None, gradient=back)
    inputs, outputs = {**by_name(into), **others}, [*out, *handed.layer_ios.values()]
    kinds = build_runs_by_type(names[0], layers, inputs, outputs, settings)
    reads = {name: _read(layer_io, groups) for name, layer_io in handed.layer_ios.items()}
    reads["number"] = LayerIO(ROW, lambda row: row % groups)
    writes = [_added_to(x, groups)]
    phase = Phase(names[1], group, reads, writes, settings, len(layers.type_of_layer) * groups)
    phase.keep_resident(settings.config.execution.resident_layers * groups)
    experts = StreamedExperts(phase, groups, handed.zero_grads)
    return [
        replace(run, experts=experts)
        for kind, rows in layers.runs_of_one_type()
        for run in slice_runs(kinds[kind], rows)
    ]


def _read(layer_io: LayerIO, groups: int) -> LayerIO:
    """What a layer writes, as each of its groups reads it, adding to its gradient."""
    grad = None if layer_io.grad is None else replace(layer_io.grad, adds=True)
    return LayerIO(layer_io.spec, _of_layer(layer_io.handle, groups), grad)


def _added_to(layer_io: LayerIO, groups: int) -> LayerIO:
    """What a layer writes, as each of its groups adds to it."""
    grad = None if layer_io.grad is None else _of_layer(layer_io.grad, groups)
    return LayerIO(layer_io.spec, replace(_of_layer(layer_io.handle, groups), adds=True), grad)


def _of_layer(handle: RemoteHandle, groups: int) -> RemoteHandle:
    """A layer's row, for the row of one of its groups."""
    row_offset = handle.row_offset
    if not isinstance(row_offset, int):
        return handle

    def row_of(row: popxl.Tensor) -> popxl.Tensor:
        layer = row / groups
        return layer + row_offset if row_offset else layer

    return replace(handle, row_offset=row_of, grows=False)
