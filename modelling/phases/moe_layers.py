"""Phases of mixture-of-experts layers; the experts are loaded group by group.

The phase of a layer ends with the router. It outputs x and the inputs of the experts; each group of
experts then adds its outputs to x. So the gradient of x is the same before and after the experts.
In the backward pass each group adds to the gradients of its inputs before the layer itself runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import popxl
import popxl_addons as addons
from modelling.layers import LayerModules
from modelling.phases.buffers import (
    ActivationBuffers,
    LayerIO,
    create_activation_buffer,
    create_gradient_buffer,
    fixed_row_handle,
    zero_row,
)
from modelling.phases.dense_layers import build_runs_by_type, name_layer_outputs, reserve_rows
from modelling.phases.phase import Phase
from modelling.phases.phase_plan import PhaseRun, slice_runs
from modelling.phases.settings import PhaseSettings
from modelling.phases.streamed_experts import StreamedExperts
from popxl_addons.transforms.batch_serialisation import RemoteHandle

ROW = popxl.TensorSpec((), popxl.int32)


class ExpertInputs:
    """Remote buffers of the tensors besides x that a layer passes to its groups of experts.

    Args:
        specs: specs of one micro-batch on one replica, by name.
        saved: True if a backward pass reads the tensors again.
        requires_grad: True if the layers have a backward pass.
    """

    def __init__(
        self,
        specs: Mapping[str, popxl.TensorSpec],
        settings: PhaseSettings,
        saved: bool,
        requires_grad: bool,
    ) -> None:
        self._specs, self._settings, self._saved = specs, settings, saved
        self._shards = settings.activation_shards
        self._values = {n: create_activation_buffer(spec, settings) for n, spec in specs.items()}
        self._gradients = {
            n: create_gradient_buffer(spec, settings)
            for n, spec in specs.items()
            if requires_grad and spec.dtype.is_floating_point
        }

    @property
    def layer_ios(self) -> dict[str, LayerIO]:
        """The expert inputs as a layer's outputs, by name; their gradients are one layer's only."""
        return {
            name: LayerIO(
                spec,
                RemoteHandle(self._values[name], 0 if self._saved else None, self._shards),
                fixed_row_handle(self._gradients[name], 0, self._shards)
                if name in self._gradients
                else None,
            )
            for name, spec in self._specs.items()
        }

    def zero_grads(self) -> None:
        """Zero the expert inputs' gradients before a layer's expert groups add to them."""
        for buffer in self._gradients.values():
            zero_row(buffer, 0, self._settings)


def build_moe_runs(
    names: tuple[str, str],
    layers: LayerModules,
    expert_group: addons.Module,
    activations: Sequence[ActivationBuffers],
    extra_inputs: Mapping[str, LayerIO],
    settings: PhaseSettings,
    usage_requires_grad: bool,
) -> list[PhaseRun]:
    """Build the phases of layers and of the streamed experts that follow each layer.

    Args:
        names: names of the layers' phase and of the experts' phase.
        layers: modules whose `build(x, usage, *extra_inputs)` returns x, usage and the expert
            inputs, whose specs `expert_input_specs(x)` returns by name.
        expert_group: a group of experts; `build(*expert_inputs, group_index, seed=None)` returns
            the tensor that is added to x.
        activations: rows of x and of the expert usage.
        extra_inputs: further inputs of each layer, by name.
        usage_requires_grad: True if the expert usage has a gradient.
    """
    groups = settings.config.execution.expert_groups
    trainable, experts_trainable = map(settings.is_phase_trainable, names)
    usage_grad = trainable and usage_requires_grad
    inputs, outputs = reserve_rows(activations, layers, trainable or experts_trainable, usage_grad)
    has_backward = trainable or any(layer_io.grad is not None for layer_io in inputs)
    x = outputs[0]
    specs = layers.modules[0].expert_input_specs(x.spec)  # type: ignore[attr-defined]
    expert_inputs = ExpertInputs(specs, settings, x.grad is not None, has_backward)
    layer_inputs = {**name_layer_outputs(inputs), **extra_inputs}
    layer_outputs = [*outputs, *expert_inputs.layer_ios.values()]
    runs = build_runs_by_type(names[0], layers, layer_inputs, layer_outputs, settings)
    reads = {
        n: _expert_group_input(layer_io, groups) for n, layer_io in expert_inputs.layer_ios.items()
    }
    reads["group_index"] = LayerIO(ROW, lambda row: row % groups)
    writes = [_expert_group_output(x, groups)]
    phase = Phase(
        names[1], expert_group, reads, writes, settings, len(layers.type_of_layer) * groups
    )
    phase.keep_resident(settings.config.execution.resident_layers * groups)
    experts = StreamedExperts(phase, groups, expert_inputs.zero_grads)
    return [
        replace(run, experts=experts)
        for kind, rows in layers.runs_of_one_type()
        for run in slice_runs(runs[kind], rows)
    ]


def _expert_group_input(layer_io: LayerIO, groups: int) -> LayerIO:
    """Turn a layer output into the input of each of its expert groups, which sum its gradient."""
    grad = None if layer_io.grad is None else replace(layer_io.grad, adds=True)
    return LayerIO(layer_io.spec, _layer_row_handle(layer_io.value_handle, groups), grad)


def _expert_group_output(layer_io: LayerIO, groups: int) -> LayerIO:
    """Turn a layer output into the output of each of its expert groups, which add to its value."""
    grad = None if layer_io.grad is None else _layer_row_handle(layer_io.grad, groups)
    return LayerIO(
        layer_io.spec, replace(_layer_row_handle(layer_io.value_handle, groups), adds=True), grad
    )


def _layer_row_handle(handle: RemoteHandle, groups: int) -> RemoteHandle:
    """Buffer handle of a layer's row, computed from the row of one of its expert groups."""
    row_offset = handle.row_offset
    if not isinstance(row_offset, int):
        return handle

    def compute_row(row: popxl.Tensor) -> popxl.Tensor:
        layer = row / groups
        return layer + row_offset if row_offset else layer

    return replace(handle, row_offset=compute_row, grows=False)
