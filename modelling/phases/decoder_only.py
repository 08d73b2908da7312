"""The phases of a decoder-only model, and their order in training.

Row 0 of the activation rows is the embeddings' output, row i + 1 that of layer i.
"""

from __future__ import annotations

import popxl
from data.causal_lm import examples_per_row
from modelling.layers import Axes, Embeddings, Layers, LMHeadLoss
from modelling.phases.buffers import ActivationBuffers, InputBuffers
from modelling.phases.layout import Layout
from modelling.phases.loss_phase import LossPhase
from modelling.phases.phase import Phase
from modelling.phases.settings import Settings


def decoder_only_layout(
    settings: Settings, embeddings: Embeddings, layers: Layers, head: LMHeadLoss
) -> Layout:
    """Embeddings, layers, and the head.

    Inputs: `words`, int32 (micro-batch, sequence_length), those of the head's objective, and where
    samples hold several texts, `starts`, see `data.causal_lm.starts_of`.

    Args:
        layers: `build(x, seed=None)` returns the shape of x, (batch, length, hidden), or
            `build(x, starts, seed=None)` where samples hold several texts.
        head: it may be tied to the embedding.
    """
    config = settings.config
    model, batch = config.model, config.execution.micro_batch_size
    words = popxl.TensorSpec((batch, model.sequence_length), popxl.int32)
    learned = head.objective.streams(words)
    packed = {"starts": words} if examples_per_row(config) > 1 else {}
    inputs = InputBuffers({"words": words} | learned | packed, settings)
    shape = Axes.of(config).shape(batch, model.sequence_length, model.hidden_size)
    hidden, count = popxl.TensorSpec(shape, settings.dtype), len(layers.order)
    row = ActivationBuffers.create(hidden, count + 1, settings).port
    first = Phase("embeddings", embeddings, inputs.ports(["words"]), row(0), settings)
    kinds: list[Phase] = []
    for number, module in enumerate(layers.kinds):
        kinds.append(
            Phase(
                f"layer_{number + 1}" if number else "layer",
                module,
                {"x": row(0), **inputs.ports(packed)},
                row(1),
                settings,
                count,
                weights_of=kinds[0] if kinds else None,  # it has the variables of all layers
            )
        )
    head_inputs = {"x": row(count), **inputs.ports(learned)}
    last = LossPhase("head", head, head_inputs, settings, {"tokens": first} if head.tied else None)
    stack = [(kinds[kind], rows) for kind, rows in layers.runs()]
    return Layout(inputs, [(first, range(1)), *stack, (last, range(1))])
