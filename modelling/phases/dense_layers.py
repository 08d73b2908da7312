"""Phases of layers whose experts, if any, load with them: one phase per layer type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from modelling.layers import LayerModules
from modelling.phases.buffers import ActivationBuffers, LayerIO
from modelling.phases.phase import Phase
from modelling.phases.phase_plan import PhaseRun, slice_runs, split_by_remat
from modelling.phases.settings import PhaseSettings

LayerIOs = tuple[LayerIO, ...]


def name_layer_outputs(layer_ios: Iterable[LayerIO]) -> dict[str, LayerIO]:
    """Map the names `x` and, if present, `expert_usage` to a layer's outputs."""
    return dict(zip(("x", "expert_usage"), layer_ios, strict=False))


def reserve_rows(
    activations: Sequence[ActivationBuffers],
    layers: LayerModules,
    requires_grad: bool,
    usage_requires_grad: bool,
) -> tuple[LayerIOs, LayerIOs]:
    """Reserve rows of the activation buffers for layers; returns their inputs and outputs.

    Args:
        activations: rows of x and, for mixtures of experts, of the expert usage.
        requires_grad: True if the layers are trainable on the path of x.
        usage_requires_grad: True if they are trainable on the path of the expert usage.
    """
    count = len(layers.type_of_layer)
    pairs = zip(activations, (requires_grad, usage_requires_grad), strict=False)
    inputs, outputs = zip(*(rows.reserve_rows(count, grad) for rows, grad in pairs), strict=True)
    return inputs, outputs


def build_runs_by_type(
    name: str,
    layers: LayerModules,
    inputs: Mapping[str, LayerIO],
    outputs: Sequence[LayerIO],
    settings: PhaseSettings,
    shared: Mapping[str, Phase] | None = None,
) -> list[list[PhaseRun]]:
    """Build a phase for each layer type, over all layers as if all were of that type.

    The caller takes for each layer the run of its type. The phase of the first type owns the
    weights of all layers, but those in `shared`, see `Phase`.
    """
    runs_by_type: list[list[PhaseRun]] = []
    for number, module in enumerate(layers.modules):
        title = f"{name}_{number + 1}" if number else name
        owner = runs_by_type[0][0].phase if runs_by_type else None
        args = inputs, outputs, settings, len(layers.type_of_layer)
        phase = Phase(title, module, *args, shared, share_weights_with=owner)
        runs_by_type.append(split_by_remat(phase))
    return runs_by_type


def runs_in_order(layers: LayerModules, runs_by_type: Sequence[list[PhaseRun]]) -> list[PhaseRun]:
    """Order the layers of all types as in the model; arguments as for `build_runs_by_type`."""
    spans = layers.runs_of_one_type()
    return [run for kind, rows in spans for run in slice_runs(runs_by_type[kind], rows)]


def build_dense_runs(
    name: str,
    layers: LayerModules,
    activations: Sequence[ActivationBuffers],
    extra_inputs: Mapping[str, LayerIO],
    settings: PhaseSettings,
    usage_requires_grad: bool,
) -> list[PhaseRun]:
    """Build the phases of layers whose experts, if any, are loaded together with them.

    Args:
        activations: rows of x and, for mixtures of experts, of the expert usage.
        extra_inputs: further inputs of each layer, by name.
        usage_requires_grad: True if the expert usage has a gradient.
    """
    trainable = settings.is_phase_trainable(name)
    usage_grad = trainable and usage_requires_grad
    inputs, outputs = reserve_rows(activations, layers, trainable, usage_grad)
    inputs_by_name = {**name_layer_outputs(inputs), **extra_inputs}
    runs = build_runs_by_type(name, layers, inputs_by_name, outputs, settings)
    return runs_in_order(layers, runs)
