"""Builds the phases of decoder-only models: embeddings, layers and head."""

from __future__ import annotations

import popxl
from data.preference_samples import SEGMENT_IDS
from modelling.decoder import DecoderSpec
from modelling.layers import ActivationLayout, LayerAdapters
from modelling.phases.block_wrappers import RouterOnlyBlock, TrainingBlock
from modelling.phases.buffers import ActivationBuffers, InputBuffers
from modelling.phases.dense_layers import build_dense_runs, name_layer_outputs
from modelling.phases.loss_phase_builder import build_loss_phases, set_objective
from modelling.phases.moe_layers import build_moe_runs
from modelling.phases.phase import Phase
from modelling.phases.phase_plan import PhasePlan, PhaseRun
from modelling.phases.settings import PhaseSettings


def build_decoder_only_phases(
    settings: PhaseSettings, decoder: DecoderSpec, adapters: LayerAdapters
) -> PhasePlan:
    """Build the phases (embeddings, layers, head) of a decoder-only model.

    Input streams: `input_ids`, int32 (micro-batch, sequence_length), and those of the head's
    objective, all of that shape; for packed samples `segment_starts`
    (`data.causal_lm.compute_segment_starts`); where expert usage is counted, `segment_ids`.
    """
    config, head = settings.config, adapters.attach_to_head(decoder.head())
    set_objective(head, settings)
    layers = adapters.build_layers(decoder.layer_names, decoder.layer_types, decoder.block)
    model, batch = config.model, config.execution.micro_batch_size
    input_ids = popxl.TensorSpec((batch, model.sequence_length), popxl.int32)
    loss_inputs = head.objective.input_specs(input_ids)
    extra = {} if decoder.expert_usage is None else {SEGMENT_IDS: input_ids}
    extra |= {"segment_starts": input_ids} if config.max_sequences_per_sample > 1 else {}
    inputs = InputBuffers({"input_ids": input_ids} | loss_inputs | extra, settings)
    layout = ActivationLayout.from_config(config)
    shape = layout.shape(batch, model.sequence_length, model.hidden_size)
    hidden = popxl.TensorSpec(shape, settings.dtype)
    trains_embeddings = settings.is_phase_trainable("embeddings")
    activations = [ActivationBuffers(hidden, settings, requires_grad=trains_embeddings)]
    token_inputs = inputs.layer_ios(["input_ids"])
    embeddings = adapters.attach_to_embeddings(decoder.embeddings())
    first = Phase("embeddings", embeddings, token_inputs, [activations[0].last_row], settings)
    expert_usage = decoder.expert_usage
    if expert_usage is not None:
        activations.append(ActivationBuffers(expert_usage.spec, settings, requires_grad=False))
    usage_grad = expert_usage is not None and expert_usage.router_aux_loss_coef > 0
    runs: list[PhaseRun] = []
    streams_experts = config.execution.expert_groups > 1
    blocks = layers.map_modules(RouterOnlyBlock if streams_experts else TrainingBlock)
    first_layer = 0
    for name, count in settings.layers_per_phase("layer", len(layers.type_of_layer)).items():
        modules = blocks.slice_layers(range(first_layer, first_layer + count))
        args = activations, inputs.layer_ios(extra), settings, usage_grad
        if decoder.experts is None:
            runs += build_dense_runs(name, modules, *args)
        else:
            group = adapters.attach_to_experts(decoder.experts(), decoder.layer_names[first_layer])
            names = name, name.replace("layer", "experts", 1)
            runs += build_moe_runs(names, modules, group, *args)
        first_layer += count
    outputs = name_layer_outputs(rows.last_row for rows in activations)
    shared = {"tokens": first} if head.tied else None
    last, batch_loss = build_loss_phases(head, outputs, inputs, settings, shared)
    order = [PhaseRun(first, range(1)), *runs, last]
    zero = {} if expert_usage is None else {"zero_activations": activations[1].zero_first_row}
    return PhasePlan(inputs, order, **zero, batch_loss=batch_loss)
