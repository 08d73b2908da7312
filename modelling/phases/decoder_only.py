"""The phases of a decoder-only model, and their order in training.

The chain's first row is the embeddings' output, then come those of the layers.
"""

from __future__ import annotations

from collections.abc import Callable

import popxl
import popxl_addons as addons
from data.preferences import SEGMENTS, texts_per_row
from modelling.layers import Axes, Embeddings, Layers, LMHeadLoss
from modelling.phases.buffers import Chain, InputBuffers
from modelling.phases.expert_groups import layers_and_experts
from modelling.phases.layer_stack import layers_alone, named
from modelling.phases.layout import Layout, Stage
from modelling.phases.loss_phase import LossPhase
from modelling.phases.phase import Phase
from modelling.phases.settings import Settings


def decoder_only_layout(
    settings: Settings,
    embeddings: Embeddings,
    layers: Layers,
    head: LMHeadLoss,
    experts: Callable[[int], addons.Module] | None = None,
) -> Layout:
    """Embeddings, layers, and the head.

    Inputs: `words`, int32 (micro-batch, sequence_length), those of the head's objective, and where
    samples hold several texts, `starts`, see `data.causal_lm.starts_of`.

    Layers may add up something besides, for which they read `segments`, and which the head takes
    after x (`DecoderLayer.added_up`).

    Args:
        layers: `build(x, seed=None)` returns the shape of x, (batch, length, hidden), or
            `build(x, starts, seed=None)` where samples hold several texts.
        head: it may be tied to the embedding.
        experts: a group of those of a layer, which has a number, where they are phases of their
            own, see `layers_and_experts`.
    """
    config = settings.config
    model, batch = config.model, config.execution.micro_batch_size
    words = popxl.TensorSpec((batch, model.sequence_length), popxl.int32)
    learned = head.objective.streams(words)
    added_up = getattr(layers.kinds[0], "added_up", None)
    read = {} if added_up is None else {SEGMENTS: words}
    read |= {"starts": words} if texts_per_row(config) > 1 else {}
    inputs = InputBuffers({"words": words} | learned | read, settings)
    shape = Axes.of(config).shape(batch, model.sequence_length, model.hidden_size)
    hidden = popxl.TensorSpec(shape, settings.dtype)
    chain = Chain(hidden, settings, trained=settings.trains_any("embeddings"))
    first = Phase("embeddings", embeddings, inputs.ports(["words"]), [chain.end], settings)
    sums = None if added_up is None else Chain(added_up, settings, trained=False)
    chains = [chain] if sums is None else [chain, sums]
    stack: list[Stage] = []
    first_layer = 0
    for name, count in settings.runs("layer", len(layers.order)).items():
        part = layers.part(range(first_layer, first_layer + count))
        others = inputs.ports(read)
        if experts is None:
            stack += layers_alone(name, part, chains, others, settings)
        else:
            names = name, name.replace("layer", "experts", 1)
            group = experts(first_layer)
            stack += layers_and_experts(names, part, group, chains, others, settings)
        first_layer += count
    head_inputs = {**named(c.end for c in chains), **inputs.ports(learned)}
    last = LossPhase("head", head, head_inputs, settings, {"tokens": first} if head.tied else None)
    order = [Stage(first, range(1)), *stack, Stage(last, range(1))]
    begin = {} if sums is None else {"begin_forward": sums.begin_value}
    return Layout(inputs, order, **begin)
