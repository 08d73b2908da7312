"""The phases of a decoder-only model, and their order in training.

The chain's first row is the embeddings' output, then come those of the layers.
"""

from __future__ import annotations

import popxl
from data.preference_samples import SEGMENT_IDS, texts_per_row
from modelling.decoder import Decoder
from modelling.layers import Axes, LayerAdapters
from modelling.phases.buffers import Chain, InputBuffers
from modelling.phases.expert_groups import layers_and_experts
from modelling.phases.layer_stack import layers_alone, named
from modelling.phases.layout import Layout, Stage
from modelling.phases.loss_phase import LossPhase
from modelling.phases.phase import Phase
from modelling.phases.samples import RoutedSamples, WholeSamples
from modelling.phases.settings import Settings


def decoder_only_layout(settings: Settings, decoder: Decoder, adapters: LayerAdapters) -> Layout:
    """Embeddings, layers, and the head.

    Inputs: `input_ids`, int32 (micro-batch, sequence_length), those of the head's objective, and
        where
    samples hold several texts, `segment_starts`, see `data.causal_lm.segment_starts_of`; where the
    usage of experts is counted, `segment_ids`, which the head takes after x.
    """
    config, head = settings.config, adapters.head(decoder.head())
    layers = adapters.layers(decoder.names, decoder.layer_types, decoder.block)
    model, batch = config.model, config.execution.micro_batch_size
    input_ids = popxl.TensorSpec((batch, model.sequence_length), popxl.int32)
    learned = head.objective.streams(input_ids)
    read = {} if decoder.usage is None else {SEGMENT_IDS: input_ids}
    read |= {"segment_starts": input_ids} if texts_per_row(config) > 1 else {}
    inputs = InputBuffers({"input_ids": input_ids} | learned | read, settings)
    shape = Axes.of(config).shape(batch, model.sequence_length, model.hidden_size)
    hidden = popxl.TensorSpec(shape, settings.dtype)
    chain = Chain(hidden, settings, trained=settings.trains_any("embeddings"))
    read_words = inputs.ports(["input_ids"])
    embeddings = adapters.embeddings(decoder.embeddings())
    first = Phase("embeddings", embeddings, read_words, [chain.end], settings)
    usage = decoder.usage
    chains = [chain]
    if usage is not None:
        chains.append(Chain(usage.spec, settings, trained=False))
    balances = usage is not None and usage.coefficient > 0
    stack: list[Stage] = []
    has_groups = config.execution.expert_groups > 1
    sampled = layers.wrapped(RoutedSamples if has_groups else WholeSamples)
    first_layer = 0
    for name, count in settings.runs("layer", len(layers.order)).items():
        part = sampled.part(range(first_layer, first_layer + count))
        others = inputs.ports(read)
        if decoder.experts is None:
            stack += layers_alone(name, part, chains, others, settings, balances)
        else:
            group = adapters.experts(decoder.experts(), decoder.names[first_layer])
            names = name, name.replace("layer", "experts", 1)
            stack += layers_and_experts(names, part, group, chains, others, settings, balances)
        first_layer += count
    head_inputs = {**named(c.end for c in chains), **inputs.ports(learned)}
    last = LossPhase("head", head, head_inputs, settings, {"tokens": first} if head.tied else None)
    order = [Stage(first, range(1)), *stack, Stage(last, range(1))]
    begin = {} if usage is None else {"begin_forward": chains[1].begin_value}
    return Layout(inputs, order, **begin)
