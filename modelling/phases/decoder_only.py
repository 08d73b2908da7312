"""The phases of a decoder-only model, and their order in training.

The chain's first row is the embeddings' output, then come those of the layers.
"""

from __future__ import annotations

import popxl
from data.preference_samples import SEGMENT_IDS, texts_per_row
from modelling.decoder import DecoderSpec
from modelling.layers import ActivationLayout, LayerAdapters
from modelling.phases.block_wrappers import RouterOnlyBlock, TrainingBlock
from modelling.phases.buffers import ActivationRows, InputBuffers
from modelling.phases.dense_layers import build_dense_runs, by_name
from modelling.phases.loss_phase import LossPhase
from modelling.phases.moe_layers import build_moe_runs
from modelling.phases.phase import Phase
from modelling.phases.phase_plan import PhasePlan, PhaseRun
from modelling.phases.settings import PhaseSettings


def build_decoder_only_phases(
    settings: PhaseSettings, decoder: DecoderSpec, adapters: LayerAdapters
) -> PhasePlan:
    """Embeddings, layers, and the head.

    Inputs: `input_ids`, int32 (micro-batch, sequence_length), those of the head's objective, and
        where
    samples hold several texts, `segment_starts`, see `data.causal_lm.segment_starts_of`; where the
    usage of experts is counted, `segment_ids`, which the head takes after x.
    """
    config, head = settings.config, adapters.attach_to_head(decoder.head())
    layers = adapters.build_layers(decoder.layer_names, decoder.layer_types, decoder.block)
    model, batch = config.model, config.execution.micro_batch_size
    input_ids = popxl.TensorSpec((batch, model.sequence_length), popxl.int32)
    learned = head.objective.input_specs(input_ids)
    read = {} if decoder.expert_usage is None else {SEGMENT_IDS: input_ids}
    read |= {"segment_starts": input_ids} if texts_per_row(config) > 1 else {}
    inputs = InputBuffers({"input_ids": input_ids} | learned | read, settings)
    layout = ActivationLayout.from_config(config)
    shape = layout.shape(batch, model.sequence_length, model.hidden_size)
    hidden = popxl.TensorSpec(shape, settings.dtype)
    chain = ActivationRows(hidden, settings, trained=settings.is_phase_trainable("embeddings"))
    read_words = inputs.layer_ios(["input_ids"])
    embeddings = adapters.attach_to_embeddings(decoder.embeddings())
    first = Phase("embeddings", embeddings, read_words, [chain.last_row], settings)
    expert_usage = decoder.expert_usage
    chains = [chain]
    if expert_usage is not None:
        chains.append(ActivationRows(expert_usage.spec, settings, trained=False))
    balances = expert_usage is not None and expert_usage.router_aux_loss_coef > 0
    stack: list[PhaseRun] = []
    has_groups = config.execution.expert_groups > 1
    sampled = layers.map_modules(RouterOnlyBlock if has_groups else TrainingBlock)
    first_layer = 0
    for name, count in settings.layers_per_phase("layer", len(layers.type_of_layer)).items():
        part = sampled.take(range(first_layer, first_layer + count))
        others = inputs.layer_ios(read)
        if decoder.experts is None:
            stack += build_dense_runs(name, part, chains, others, settings, balances)
        else:
            group = adapters.attach_to_experts(decoder.experts(), decoder.layer_names[first_layer])
            names = name, name.replace("layer", "experts", 1)
            stack += build_moe_runs(names, part, group, chains, others, settings, balances)
        first_layer += count
    head_inputs = {**by_name(c.last_row for c in chains), **inputs.layer_ios(learned)}
    last = LossPhase("head", head, head_inputs, settings, {"tokens": first} if head.tied else None)
    order = [PhaseRun(first, range(1)), *stack, PhaseRun(last, range(1))]
    begin = {} if expert_usage is None else {"zero_activations": chains[1].zero_first_row}
    return PhasePlan(inputs, order, **begin)
